"""A check of a user's operator: adjoint identity, shapes, bound."""

import math

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import OperatorError, ShapeError
from ..norms.lipschitz import lanczos_norm_sq
from ..norms.spectral import to_float64
from .base import LinearOperator

__all__ = ["check_operator"]


@checked
def check_operator(
    operator: LinearOperator,
    *,
    trials: int = 5,
    tol: float | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> None:
    r"""Raise unless ``adjoint`` is the adjoint of ``apply`` and ``norm_sq()`` is not below the norm.

    For random y and x the adjoint identity :math:`\langle Ay, x\rangle = \langle y, A^\top x\rangle` must hold up to

    .. math:: |\langle Ay, x\rangle - \langle y, A^\top x\rangle|
              \le \mathrm{tol}\,\bigl(\|Ay\|\|x\| + \|y\|\|A^\top x\|\bigr) .

    It fails for maps that are not linear, and for those that mix samples. The bound is compared with one from below.

    Args:
        operator: Any operator.
        trials: Random pairs.
        tol: The relative tolerance; None: :math:`64\,\varepsilon\,\sqrt{m + n}` of the type.
        dtype: The type of the random vectors; None: the operator's.
        generator: The source of randomness; None: a fixed seed.

    Raises:
        OperatorError: The adjoint identity or the bound is violated; the message holds the size of the mismatch.
        ShapeError: ``apply`` or ``adjoint`` returns a wrong shape.

    >>> from minimand.operators import operator
    >>> check_operator(operator(lambda y: y.roll(1, -1), lambda x: x.roll(-1, -1), (8,), (8,)))
    >>> check_operator(operator(lambda y: y.roll(1, -1), lambda x: x.roll(1, -1), (8,), (8,)))
    Traceback (most recent call last):
    ...
    minimand.errors.OperatorError: ...
    """
    dtype, device = dtype or operator.dtype, operator.device
    if generator is None:
        generator = torch.Generator(device).manual_seed(0)
    sides = math.prod(operator.input_shape), math.prod(operator.output_shape)
    tol = 64 * torch.finfo(dtype).eps * math.sqrt(sum(sides)) if tol is None else tol
    with torch.no_grad():
        for trial in range(1, trials + 1):
            y = torch.randn(2, *operator.input_shape, generator=generator, dtype=dtype, device=device)
            x = torch.randn(2, *operator.output_shape, generator=generator, dtype=dtype, device=device)
            _check_pair(operator, y, x, tol, trial)
        _check_bound(operator, torch.empty(0, dtype=dtype, device=device), tol)


def _check_pair(operator: LinearOperator, y: Tensor, x: Tensor, tol: float, trial: int) -> None:
    given = y.clone(), x.clone()
    image, back = operator.apply(y), operator.adjoint(x)
    if not torch.equal(given[0], y) or not torch.equal(given[1], x):
        raise OperatorError(f"{type(operator).__name__} changes its arguments in place; let it return new tensors")
    for name, got, like in (("apply", image, x), ("adjoint", back, y)):
        if got.shape != like.shape:
            raise ShapeError(
                f"{name} of {type(operator).__name__} returned shape {tuple(got.shape)}; expected {tuple(like.shape)}"
            )
    image, x, y, back = map(to_float64, (image, x, y, back))
    left, right = (image * x).sum(), (y * back).sum()
    scale = float(image.norm() * x.norm() + y.norm() * back.norm())
    mismatch = abs(float(left - right))
    # Written so that NaN fails, too.
    if not mismatch <= tol * scale:
        relative = mismatch / scale if scale > 0 else math.inf
        raise OperatorError(
            f"adjoint of {type(operator).__name__} is not the adjoint of apply: on random probe {trial} "
            f"⟨Ay, x⟩ = {float(left):.6g} but ⟨y, Aᵀx⟩ = {float(right):.6g}, a relative "
            f"mismatch of {relative:.2g} where {tol:.2g} is allowed; check the callables, and that apply is linear"
        )
    alone = to_float64(operator.apply(given[0][:1]))
    if not float((alone - image[:1]).norm()) <= tol * float(image.norm()):
        raise OperatorError(
            f"apply of {type(operator).__name__} gives a sample another image alone than in a batch; it must treat "
            f"samples independently of each other"
        )


def _check_bound(operator: LinearOperator, like: Tensor, tol: float) -> None:
    estimate = float(lanczos_norm_sq(operator, like))
    bound = float(operator.norm_sq())
    if not estimate * (1 - tol) <= bound < math.inf:
        raise OperatorError(
            f"norm_sq() of {type(operator).__name__} is {bound:.6g}, but its squared norm is at least {estimate:.6g}; "
            f"give a larger norm_sq, or None"
        )
