"""The function whose prox is softmax."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..tracing import forward_rule, holds, is_compiled
from .base import Function, Step, check_step
from .curves import xlogx
from .scalar import Increasing, newton, precise
from .structured import require_common_step, require_vectors

__all__ = ["SimplexEntropy"]

#: Newton iterations for the multiplier: under tracing, where the loop cannot stop, and the limit elsewhere.
TRACED_ITERATIONS = 24
EAGER_ITERATIONS = 200


@dataclass(frozen=True)
class SimplexEntropy(Function):
    r"""The negative entropy less half the square on the simplex, :math:`g(x) = \sum_i x_i\log x_i - \tfrac12\|x\|^2`
    where :math:`x \ge 0` and :math:`\sum_i x_i = 1` in the last dimension. Its prox at step 1 is softmax.

    It is convex because :math:`x\log x - \tfrac12x^2` has the second derivative :math:`1/x - 1 \ge 0` on [0, 1]. At
    step :math:`\eta` the prox is :math:`z_i = e^{u_i}`, where

    .. math:: (1-\eta)\,e^{u_i} + \eta\,u_i = a_i - \nu , \qquad \textstyle\sum_i e^{u_i} = 1 .

    Each :math:`u_i` is a root found by the safeguarded Newton iteration of every prox without a closed form. The sum
    of the :math:`e^{u_i}` is convex and decreasing in :math:`\nu`, so that Newton's method from
    :math:`\nu = \max_i a_i - (1-\eta)`, where the sum is at least 1, increases to the solution. With
    :math:`d_i = z_i/((1-\eta)z_i + \eta)` the derivative is
    :math:`\operatorname{diag}(d) - dd^\top/\sum_i d_i`, by the implicit function theorem; it can be differentiated any
    number of times. For small steps the prox tends to that of the :class:`Simplex`, sparsemax.

    Example:
        >>> a = torch.tensor([1.0, 2.0, 3.0])
        >>> torch.equal(SimplexEntropy().prox(a), torch.softmax(a, -1))
        True
        >>> SimplexEntropy().prox(a, 0.1)
        tensor([7.4727e-06, 8.0072e-02, 9.1992e-01])
    """

    def value(self, x: Tensor) -> Tensor:
        """The negative entropies less half the squares, summed over the batch; +inf off the simplex."""
        wide = require_vectors(x)
        room = 4 * torch.finfo(x.dtype).eps * (x.shape[-1] + 4)
        inside = (wide >= -room).all(-1) & ((wide.sum(-1) - 1).abs() <= room)
        values = (xlogx(wide) - 0.5 * wide.square()).sum(-1)
        return torch.where(inside, values, torch.inf).sum()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Softmax at step 1, a root elsewhere."""
        require_common_step(step, 1, "SimplexEntropy")
        eta = check_step(step, x)
        if not isinstance(eta, Tensor) and eta == 1:
            return torch.softmax(require_vectors(x), -1).to(x.dtype)
        wide = precise(require_vectors(x), eta)
        # The prox is invariant to a common shift.
        wide = wide - wide.detach().amax(-1, keepdim=True)
        each = eta.to(wide.dtype) if isinstance(eta, Tensor) else wide.new_full((), eta)
        each = each.expand(*wide.shape[:-1], 1)
        rule = _CompiledEntropy if is_compiled(wide) else _Entropy
        return rule.apply(wide, each).to(x.dtype)


class _Logarithm(Increasing):
    r"""The equation :math:`(1-\eta)e^u + \eta u = t` of the logarithm of an entry, on :math:`u \le 0`."""

    def left(self, z: Tensor, step: Step) -> Tensor:
        return (1 - step) * z.exp() + step * z

    def slope(self, z: Tensor, step: Step) -> Tensor:
        return (1 - step) * z.exp() + step

    def sensitivity(self, z: Tensor, step: Step) -> Tensor:
        return z - z.exp()

    def slopes(self, step: Step) -> tuple[Step, Step]:
        eta = torch.as_tensor(step)
        return eta.clamp_max(1.0), eta.clamp_min(1.0)

    def bracket(self, target: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        first, second = target / step, (target - 1) / step + 1
        high = torch.maximum(first, second).clamp_max(0.0)
        return torch.minimum(torch.minimum(first, second), high), high, high


def _multiplied(x: Tensor, step: Tensor) -> Tensor:
    """The prox of points whose largest entry is zero."""
    equation, tracing = _Logarithm(), is_compiled(x)
    nu = step - 1 + torch.zeros_like(x[..., :1])
    eps = torch.finfo(x.dtype).eps
    wide = step.expand_as(x)
    for _ in range(TRACED_ITERATIONS if tracing else EAGER_ITERATIONS):
        z = newton(equation, x - nu, wide).exp()
        total = z.sum(-1, keepdim=True)
        # Rounding can leave the sum a little below one; Newton's method then steps back.
        nu = nu + (total - 1) / (z / ((1 - step) * z + step)).sum(-1, keepdim=True)
        if holds(~((total - 1).abs() > 4 * eps * (1 + x.shape[-1] ** 0.5))):
            break
    return z / total


class _CompiledEntropy(torch.autograd.Function):
    """The prox and its gradient by the implicit function theorem."""

    @staticmethod
    def forward(x: Tensor, step: Tensor) -> Tensor:
        return _multiplied(x, step)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        saved = (output, inputs[1])
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        z, step = ctx.saved_tensors
        weight = z / ((1 - step) * z + step)
        passed = grad - (weight * grad).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
        fall = (passed * _fall(z, step)).sum(-1, keepdim=True) if ctx.needs_input_grad[1] else None
        return weight * passed, fall


class _Entropy(_CompiledEntropy):
    """The same with forward-mode derivatives and vmap, which torch.compile refuses to trace."""

    generate_vmap_rule = True

    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], tangent: Tensor | None, step_tangent: Tensor | None) -> Tensor:
        z, step = saved
        weight = z / ((1 - step) * z + step)
        moved = torch.zeros_like(z) if tangent is None else weight * tangent
        if step_tangent is not None:
            moved = moved + _fall(z, step) * step_tangent
        return moved - weight * (moved.sum(-1, keepdim=True) / weight.sum(-1, keepdim=True))


def _fall(z: Tensor, step: Tensor) -> Tensor:
    """The derivative of each entry in the step at a fixed multiplier."""
    return (z * z - xlogx(z)) / ((1 - step) * z + step)
