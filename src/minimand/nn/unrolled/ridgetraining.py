"""The training recipe of RidgeNet: rates per kind of parameter, a cosine, and the training of the tail."""

import math

import torch
from torch import Tensor

from ...errors import CapabilityError, OptionError, Sealed, require_positive
from ...solvers.base import require_count
from .ridgenet import RidgeNet

__all__ = ["RidgeTrainer"]

_RATES = {"filters": 2e-3, "log_scale": 1e-2, "exponent": 5e-3, "log_temperature": 2e-2}
_OTHERS = 1e-2
_WARM_UP = 50
_CLIP = 0.5
# The iterations without derivatives in a step that trains the tail.
_TAIL = (3, 19)


class RidgeTrainer(Sealed):
    r"""AdamW with warm-up, cosine decay and clipped gradients for a :class:`RidgeNet`.

    The first half of the steps trains the image after the phases. In the second half every other step trains the tail:
    the image after 9 to 25 further iterations of the solver, of which the last six are differentiated. So the objective
    is trained where it is minimised, not only where the phases end.

    Args:
        net: The network.
        steps: The number of steps of the schedule.
        rate: A factor of all learning rates.

    >>> from minimand.operators import orthonormal_gaussian
    >>> _ = torch.manual_seed(0)
    >>> phi, x = orthonormal_gaussian(8, 25), torch.rand(16, 25)
    >>> trainer = RidgeTrainer(RidgeNet(phi, phases=2, filters=8, size=3), steps=20)
    >>> losses = [trainer.step(x @ phi.mT, x) for _ in range(20)]
    >>> losses[-1] < losses[0]
    True
    """

    def __init__(self, net: RidgeNet, steps: int, rate: float = 1.0) -> None:
        if not isinstance(net, RidgeNet):
            raise CapabilityError(f"RidgeTrainer trains a RidgeNet, got a {type(net).__name__}")
        require_count("steps", steps)
        require_positive("rate", rate)
        if rate > torch.finfo(torch.float32).max:
            raise OptionError(f"rate={rate:g} exceeds the range of float32; it is a factor of learning rates")
        self.net, self.steps = net, steps
        groups = [{"params": [p], "lr": rate * _rate(name)} for name, p in net.named_parameters() if p.requires_grad]
        if not groups:
            raise OptionError("no parameter of the network requires gradients; call net.requires_grad_(True)")
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        warm = max(1, min(_WARM_UP, steps // 4))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda k: min(1.0, (k + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1.0, k / steps)))
        )

    def step(self, y: Tensor, target: Tensor) -> float:
        """One optimizer step on a batch; returns the loss."""
        done = self.schedule.last_epoch
        tail = int(torch.randint(_TAIL[0], _TAIL[1] + 1, ())) if 2 * done >= self.steps and done % 2 else 0
        loss = self.net.loss(y, target, tail=tail)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), _CLIP)
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())


def _rate(name: str) -> float:
    return next((rate for part, rate in _RATES.items() if part in name.split(".")), _OTHERS)
