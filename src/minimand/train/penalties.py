r"""The theory of proximal backpropagation as functions: penalty energy, Algorithms 1 and 2, angle, eigenvalue range.

They are written for reading and checking, by automatic differentiation and dense linear algebra, for small networks.
:class:`~minimand.train.ProxProp` computes the same steps for training.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import grad

from ..arguments import checked
from ..errors import CapabilityError, ShapeError, require_positive

__all__ = ["descent_angle", "metric_range", "penalty_energy", "penalty_sweep"]

Loss = Callable[[Tensor, Tensor], Tensor]


class _Stage(NamedTuple):
    """A linear map φ with parameters, its name in the model, and the activation σ after it."""

    name: str
    phi: nn.Module
    sigma: nn.Sequential


def _stages(model: nn.Module) -> tuple[nn.Sequential, list[_Stage]]:
    """What comes before the first layer with parameters, and all layers; the last one has no activation."""
    if not isinstance(model, nn.Sequential):
        raise CapabilityError(f"the penalty form is for an nn.Sequential of layers, got {type(model).__name__}")
    begin, stages = nn.Sequential(), list[_Stage]()
    for name, module in model.named_children():
        if any(True for _ in module.parameters()):
            stages.append(_Stage(name, module, nn.Sequential()))
        else:
            (stages[-1].sigma if stages else begin).append(module)
    if len(stages) < 2 or len(stages[-1].sigma):
        raise CapabilityError("the penalty form needs two layers or more with parameters, the last one linear")
    return begin, stages


@checked
def penalty_energy(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    a: Sequence[Tensor],
    z: Sequence[Tensor],
    *,
    gamma: float = 1.0,
    rho: float = 1.0,
) -> Tensor:
    r"""The quadratic penalty energy of which backpropagation is a sweep of gradient steps,

    .. math::
        E(\theta, a, z) = \mathcal L_y(\phi(\theta_{L-1}, a_{L-2}))
        + \sum_{l=1}^{L-2} \tfrac\gamma2\|\sigma(z_l) - a_l\|^2 + \tfrac\rho2\|\phi(\theta_l, a_{l-1}) - z_l\|^2.

    Args:
        model: An ``nn.Sequential`` of layers φ with parameters, each but the last with activations σ after it.
        x: The inputs, a₀.
        y: The targets of the loss.
        loss: A function of the last layer's output and the targets.
        a: The activations a₁ … of the hidden layers.
        z: The pre-activations z₁ … of the hidden layers.
        gamma: The weight γ of the activations.
        rho: The weight ρ of the linear maps.

    At the activations of the forward pass E is the loss. Source: [Frerix2018], eq. 3.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> x, y, loss = torch.randn(4, 2), torch.randn(4, 1), nn.functional.mse_loss
    >>> z = model[0](x)
    >>> bool(penalty_energy(model, x, y, loss, [z.tanh()], [z]) == loss(model(x), y))
    True
    >>> moved = penalty_energy(model, x, y, loss, [z.tanh()], [z + 1], rho=2.0, gamma=1e-30)
    >>> torch.allclose(moved - loss(model(x), y), torch.tensor(12.0))
    True
    """
    require_positive("gamma", gamma)
    require_positive("rho", rho)
    begin, (*hidden, last) = _stages(model)
    if not len(a) == len(z) == len(hidden):
        raise ShapeError(f"the network has {len(hidden)} hidden layers, got {len(a)} activations and {len(z)} of z")
    below = begin(x)
    penalty = below.new_zeros(())
    for stage, above, middle in zip(hidden, a, z, strict=True):
        penalty = penalty + gamma / 2 * (stage.sigma(middle) - above).square().sum()
        penalty = penalty + rho / 2 * (stage.phi(below) - middle).square().sum()
        below = above
    return loss(last.phi(below), y) + penalty


@checked
def penalty_sweep(
    model: nn.Module, x: Tensor, y: Tensor, loss: Loss, *, tau: float, tau_theta: float | None = None
) -> dict[str, Tensor]:
    r"""One sweep of Algorithm 1 or 2: the parameters after it, by name; the model is not changed.

    After the forward pass (7), from the last layer down, with ρ = γ = 1/τ:

    .. math::
        a_{L-2}^+ &= a_{L-2} - \tau\nabla_a \mathcal L_y(\phi(\theta_{L-1}, a_{L-2})) & (8)\\
        z_l^+ &= z_l - \nabla\sigma(z_l)\,(\sigma(z_l) - a_l^+) & (9)\\
        a_{l-1}^+ &= a_{l-1} - \nabla_a \tfrac12\|\phi(\theta_l, a_{l-1}) - z_l^+\|^2 & (10)\\
        \theta_l^+ &= \theta_l - \nabla_\theta\tfrac12\|\phi(\theta_l, a_{l-1}) - z_l^+\|^2
        \quad\text{or}\quad
        \operatorname*{argmin}_\theta \tfrac12\|\phi(\theta, a_{l-1}) - z_l^+\|^2
        + \tfrac1{2\tau_\theta}\|\theta - \theta_l\|^2 & (11)

    and an explicit step of length τ on the last layer (12).

    Args:
        model: As for :func:`penalty_energy`.
        x: The inputs.
        y: The targets of the loss.
        loss: A function of the last layer's output and the targets.
        tau: The step size τ.
        tau_theta: The proximal step τθ of Algorithm 2; None: the explicit step of Algorithm 1, whose sweep is a
            gradient step on the loss (Proposition 1).

    Source: [Frerix2018], Algorithms 1 and 2, eqs. 7–12.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> x, y, loss = torch.randn(4, 2), torch.randn(4, 1), nn.functional.mse_loss
    >>> new = penalty_sweep(model, x, y, loss, tau=0.1)
    >>> loss(model(x), y).backward()
    >>> all(torch.allclose(new[n], p - 0.1 * p.grad, atol=1e-6) for n, p in model.named_parameters())
    True
    """
    require_positive("tau", tau)
    require_positive("tau_theta", 1.0 if tau_theta is None else tau_theta)
    begin, (*hidden, last) = _stages(model)
    with torch.no_grad():
        a, z = [begin(x)], list[Tensor]()
        for stage in hidden:
            z.append(stage.phi(a[-1]))
            a.append(stage.sigma(z[-1]))
    top = a[-1].requires_grad_()
    with torch.enable_grad():
        slope, *slopes = grad(loss(last.phi(top), y), [top, *last.phi.parameters()])
    above = a[-1].detach() - tau * slope
    named = zip(last.phi.named_parameters(), slopes, strict=True)
    new = {f"{last.name}.{n}": p.detach() - tau * g for (n, p), g in named}
    for level in reversed(range(len(hidden))):
        stage, below = hidden[level], a[level].detach().requires_grad_()
        middle = z[level].requires_grad_()
        with torch.enable_grad():
            (slope,) = grad((stage.sigma(middle) - above).square().sum() / 2, middle)
            target = z[level].detach() - slope
            misfit = (stage.phi(below) - target).square().sum() / 2
            slope, *slopes = grad(misfit, [below, *stage.phi.parameters()])
        above = below.detach() - slope
        steps = slopes if tau_theta is None else _proximal(stage.phi, below.detach(), slopes, tau_theta)
        named = zip(stage.phi.named_parameters(), steps, strict=True)
        new |= {f"{stage.name}.{n}": p.detach() - step for (n, p), step in named}
    return new


def _proximal(phi: nn.Module, below: Tensor, slopes: Sequence[Tensor], tau_theta: float) -> list[Tensor]:
    """(JᵀJ + I/τθ)⁻¹ times the gradients, J the dense Jacobian of φ with respect to its parameters."""
    values = {name: p.detach() for name, p in phi.named_parameters()}
    jacobians = torch.func.jacrev(lambda v: torch.func.functional_call(phi, v, (below,)).flatten())(values)
    J = torch.cat([jacobian.flatten(1) for jacobian in jacobians.values()], 1)
    metric = J.mT @ J + torch.eye(J.shape[1], dtype=J.dtype, device=J.device) / tau_theta
    solved = torch.linalg.solve(metric, torch.cat([slope.flatten() for slope in slopes]))
    parts = solved.split([slope.numel() for slope in slopes])
    return [part.reshape(slope.shape) for part, slope in zip(parts, slopes, strict=True)]


@checked
def descent_angle(direction: Iterable[Tensor], gradient: Iterable[Tensor]) -> float:
    r"""The angle α in degrees between a direction, such as ProxProp leaves in ``.grad``, and the gradient.

    .. math:: \cos\alpha = \frac{\langle d, g\rangle}{\|d\|\,\|g\|}

    Weight and bias of a layer belong together. A direction of ProxProp has α < 90°, bounded away from it by
    :func:`metric_range`. Source: [Frerix2018], Proposition 4 and eq. 33.

    >>> round(descent_angle([torch.tensor([1.0, 1.0])], [torch.tensor([2.0, 0.0])]), 6)
    45.0
    """
    d, g = (torch.cat([part.detach().flatten().double() for part in parts]) for parts in (direction, gradient))
    if d.shape != g.shape:
        raise ShapeError(f"the direction has {d.numel()} entries and the gradient {g.numel()}")
    size = float(d.norm() * g.norm())
    return math.degrees(math.acos(max(-1.0, min(1.0, float(d @ g) / size)))) if size else math.nan


@checked
def metric_range(rows: Tensor, tau_theta: float, *, bias: bool = False) -> tuple[float, float]:
    r"""The smallest and largest eigenvalue of :math:`M^{-1} = (A^\top A + I/\tau_\theta)^{-1}`.

    They lie in :math:`(0, \tau_\theta]`. Their ratio bounds the cosine of :func:`descent_angle` from below (eq. 33),
    and the interval is what convergence in the stochastic setting assumes. ``rows`` are the inputs of a layer; ``bias``
    appends the column of ones. Source: [Frerix2018], §4.2.3.

    >>> low, high = metric_range(torch.tensor([[3.0, 0.0]]), 0.5)
    >>> round(low, 6), round(high, 6)
    (0.090909, 0.5)
    """
    require_positive("tau_theta", tau_theta)
    a = rows.detach().reshape(-1, rows.shape[-1]).double()
    a = torch.cat([a, a.new_ones(len(a), 1)], 1) if bias else a
    values = torch.linalg.svdvals(a).square()
    least = float(values[-1]) if len(values) and len(a) >= a.shape[1] else 0.0
    most = float(values[0]) if len(values) else 0.0
    return 1 / (most + 1 / tau_theta), 1 / (least + 1 / tau_theta)
