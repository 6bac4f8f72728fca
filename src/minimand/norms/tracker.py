"""A bound on the norm of a layer that holds while its weight changes."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..errors import CapabilityError, OptionError, is_traced, require_finite, require_positive
from .kernel import Bounds, Kernel, decode, encode
from .lipschitz import Bounded
from .spectral import EPS, round_up, to_float64, top_singular

__all__ = ["LipschitzTracker"]

POLICIES = ("drift", "manual")
STATE = ("anchor", "root_total", "root_inputs", "root_outputs", "direction")
COLD_RTOL = 1e-3
WARM_RTOL = 5e-3  # of a renewal during training, where the drift term is larger than this
# Between these, a float32 sum of squares has neither underflowed nor overflowed.
TRUSTED = (1e-10, 1e15)
FLAT = 1 << 18  # entries up to which one flat float32 sum is accurate enough
FLOAT32_EPS = torch.finfo(torch.float32).eps


State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Roots(NamedTuple):
    """Norms, or drifts of norms: of the whole operator, per input, per output."""

    total: Tensor
    inputs: Tensor
    outputs: Tensor


class LipschitzTracker(nn.Module):
    r"""Bounds on :math:`\|A\|^2` and its parts that are never below the truth while the weight :math:`W` changes.

    The tracker keeps a certified bound :math:`L_0` and the weight :math:`W_0` that it belongs to. Since
    :math:`W \mapsto A` is linear and :math:`\|A\| \le \sqrt{r}\,\|W\|_F`,

    .. math:: \sqrt{\hat L} = \sqrt{L_0} + \sqrt{r}\, \|W - W_0\|_F \ge \|A\|,

    where :math:`r` is the number of windows that share one input: 1 for a dense weight, :math:`k_h k_w` for
    a convolution, :math:`\lceil k_h/s \rceil \lceil k_w/s \rceil` with a stride
    (:math:`\|Ay\|^2 = \sum_p \|W y_p\|^2 \le \|W\|_2^2 \sum_p \|y_p\|^2`, and each input lies in at most
    :math:`r` of the windows :math:`y_p`). With groups the norm is that of the largest group. The bound depends on
    the values of :math:`W` only, so that it follows in-place edits, ``.data``, ``load_state_dict`` and optimizers.

    - ``refresh="drift"``: :math:`W_0, L_0` are renewed when the second term exceeds ``tolerance`` times the
      first (by default 0.18 for dense weights, 0.1 for convolutions, whose :math:`L_0` is less tight).
    - ``refresh="manual"``: the bound is :math:`L_0` of the last :meth:`refresh`, as in [Bibi2019],
      where it is renewed once an epoch. **Unsafe**: early in training the truth can be several times larger, and
      the step is then too long.

    ``inputs`` and ``outputs`` switch on bounds per input and per output feature. A layer passes its own weight to
    :meth:`bounds`, so that its tracker can be built with a weight on the meta device. State is in non-persistent
    buffers: it moves and is copied with the module, and ``state_dict`` stays empty. While compiling, the renewal is a
    custom operator. While exporting, only the formula is traced, so run the module once before. In training, a renewal
    of a dense weight starts from the last singular vector and is half a per cent looser; in evaluation the bound
    depends on the weight alone.

    >>> from minimand.operators import Dense
    >>> A = Dense(torch.eye(3))
    >>> tracker = LipschitzTracker(A)
    >>> before = tracker.bound()
    >>> _ = A.weight.mul_(2.0)
    >>> bool(1 <= before < 1.01), bool(4 <= tracker.bound() < 4.04)
    (True, True)
    """

    anchor: Tensor
    root_total: Tensor
    root_inputs: Tensor
    root_outputs: Tensor
    direction: Tensor

    def __init__(
        self,
        operator: Bounded,
        *,
        refresh: str = "drift",
        tolerance: float | None = None,
        inputs: bool = False,
        outputs: bool = False,
    ) -> None:
        super().__init__()
        if refresh not in POLICIES:
            raise OptionError(f"refresh must be one of {', '.join(POLICIES)}, got {refresh!r}")
        kernel = operator.kernel
        if kernel is None:
            raise CapabilityError(
                f"LipschitzTracker takes a Dense, Conv1d or Conv2d, got a {type(operator).__name__}; "
                f"call its norm_sq() whenever the operator changes"
            )
        if tolerance is not None:
            require_positive("tolerance", tolerance, zero=True)
        self.operator = operator
        self._geometry = kernel.geometry
        self.policy = refresh
        self.tolerance = tolerance if tolerance is not None else 0.18 if kernel.geometry is None else 0.1
        self.inputs = inputs
        self.outputs = outputs
        self.refreshes = 0
        self._reset(operator.weight)

    def bound(self) -> Tensor:
        r"""A bound on :math:`\|A\|^2` for the operator's present weight; a constant for autograd."""
        return self.bounds().total

    def bounds(self, weight: Tensor | None = None) -> Bounds:
        """The bounds for ``weight``, by default the operator's; constants for autograd."""
        weight = self._fitting(weight)
        if self.policy == "manual":
            if self.refreshes == 0 and not is_traced(weight):
                self.refresh(weight)
            return self._squared(weight, None)
        # In evaluation equal weights must have equal bounds, whatever weights came before.
        tolerance = self.tolerance if self.training else 0.0
        if not is_traced(weight):
            return self._renewed(weight, tolerance)
        if not torch.compiler.is_exporting() and torch.compiler.is_compiling():
            _renew(weight, *self._state(), tolerance, encode(self._geometry))
        return self._squared(weight, self._drift(weight))

    @torch.no_grad()
    def refresh(self, weight: Tensor | None = None) -> Self:
        """Certify ``weight`` (by default the operator's) and make it the new reference."""
        return self._refresh(self._fitting(weight), warm=False)

    def _fitting(self, weight: Tensor | None) -> Tensor:
        """The weight, by default the operator's; a weight of another shape or type discards the reference."""
        weight = self.operator.weight.detach() if weight is None else weight.detach()
        if weight.shape != self.anchor.shape or weight.dtype != self.anchor.dtype:
            self._reset(weight)
        return weight

    def _refresh(self, weight: Tensor, *, warm: bool) -> Self:
        require_finite("the weight", weight)
        _anchor(Kernel(weight, self._geometry), self._state(), warm)
        self.refreshes += 1
        return self

    def _renewed(self, weight: Tensor, tolerance: float) -> Bounds:
        """The bounds, after a renewal if the weight has moved too far."""
        moved = _total_drift(Kernel(weight, self._geometry), self.anchor)
        # Written so that NaN refreshes, too: the certificate then raises an error that names the weight.
        if self.refreshes == 0 or not moved <= tolerance * float(self.root_total):
            self._refresh(weight, warm=tolerance > 0 and self.refreshes > 0)
            moved = 0.0
        if self.inputs or self.outputs:
            trusted = weight.dtype == torch.float32 and TRUSTED[0] < moved < TRUSTED[1]
            precision = torch.float32 if trusted else torch.float64
            return self._squared(weight, self._drift(weight, precision) if moved else None)
        # Python numbers: ten operations on tensors of one entry would take longer than the drift.
        return Bounds(_above((float(self.root_total) + moved) ** 2, weight))

    def _state(self) -> State:
        return self.anchor, self.root_total, self.root_inputs, self.root_outputs, self.direction

    def _reset(self, weight: Tensor) -> None:
        """Use a zero weight as the reference: its norm is zero, which is valid and needs no computation."""
        device = None if weight.device.type == "meta" else weight.device
        kernel = Kernel(weight, self._geometry)
        inputs = kernel.inputs if self.inputs else 0
        outputs = kernel.outputs if self.outputs else 0
        side = min(weight.shape) if self._geometry is None else 0
        shapes: tuple[tuple[int, ...], ...] = (tuple(weight.shape), (), (inputs,), (outputs,), (side,))
        for name, shape in zip(STATE, shapes, strict=True):
            value = torch.zeros(shape, dtype=weight.dtype, device=device)
            self.register_buffer(name, value, persistent=False)
        self.refreshes = 0

    def _drift(self, weight: Tensor, precision: torch.dtype = torch.float64) -> Roots:
        return _drift(Kernel(weight, self._geometry), self.anchor, self.inputs, self.outputs, precision)

    def _squared(self, weight: Tensor, drift: Roots | None) -> Bounds:
        # The square of a small float32 number may be zero.
        work = torch.float32 if weight.device.type == "mps" else torch.float64
        slack = 1 + 8 * torch.finfo(work).eps

        def square(root: Tensor, moved: Tensor | None) -> Tensor:
            root = root.to(work)
            value = root if moved is None else root + moved.to(work)
            return round_up((value.square() * slack).to(torch.float64), weight.dtype)

        parts = (None, None, None) if drift is None else drift
        return Bounds(
            square(self.root_total, parts[0]),
            square(self.root_inputs, parts[1]) if self.inputs else None,
            square(self.root_outputs, parts[2]) if self.outputs else None,
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move or cast the buffers. A cast changes the reference weight, and its norms are raised accordingly."""
        before = self._state()
        super()._apply(fn, recurse)
        if self.anchor.is_meta or before[0].is_meta or self.anchor.dtype == before[0].dtype:
            return self
        old = before[0].to(self.anchor.device)
        moved = _drift(Kernel(self.anchor.double(), self._geometry), old.double(), self.inputs, self.outputs)
        for new, root, extra in zip(self._state()[1:4], before[1:4], moved, strict=True):
            if new.numel():
                new.copy_(round_up(root.to(new.device).double() + extra, new.dtype))
        return self


def _total_drift(kernel: Kernel, anchor: Tensor) -> float:
    """The most by which the norm of the whole map can have grown from the weight ``anchor`` to the kernel's."""
    weight, groups, shared = kernel.weight, kernel.groups, kernel.overlap
    # One call where the rounding error of a flat float32 sum, half a unit per term at most, is negligible.
    if weight.dtype == torch.float32 and groups == 1 and weight.numel() <= FLAT:
        total = float(torch.dist(weight, anchor))
        if TRUSTED[0] < total < TRUSTED[1]:
            return shared**0.5 * total * (1 + (weight.numel() + 16) * 0.5 * FLOAT32_EPS)
    elif weight.dtype == torch.float32:
        rows = torch.linalg.vector_norm((weight - anchor).flatten(1), dim=1)
        total = float(torch.linalg.vector_norm(rows.unflatten(0, (groups, -1)), dim=1).amax())
        if TRUSTED[0] < total < TRUSTED[1]:
            return shared**0.5 * total * (1 + (anchor[0].numel() + len(rows) + 16) * FLOAT32_EPS)
    if torch.equal(weight, anchor):
        return 0.0
    return float(_drift(kernel, anchor, False, False).total)


def _drift(
    kernel: Kernel, anchor: Tensor, inputs: bool, outputs: bool, precision: torch.dtype = torch.float64
) -> Roots:
    """The most by which the norms can have grown from ``anchor``; squares are summed in ``precision``."""
    weight, groups, shared = kernel.weight, kernel.groups, kernel.overlap
    work = torch.promote_types(weight.dtype, torch.float32)
    precision = torch.float32 if weight.device.type == "mps" else precision
    info = torch.finfo(precision)
    squares = (weight.to(work) - anchor.to(work)).to(precision).square().flatten(2 if weight.dim() > 2 else 1)
    per_input = squares.sum(-1) if squares.dim() == 3 else squares
    rows = per_input.sum(1)
    total = rows.unflatten(0, (groups, -1)).sum(1).amax(0)
    none = rows.new_zeros(0)
    columns = per_input.unflatten(0, (groups, -1)).sum(1).flatten() if inputs else none
    factor = shared**0.5 * (1 + (squares[0].numel() + len(rows) + 16) * info.eps + torch.finfo(work).eps)
    # A square below the smallest normal number may have been lost.
    lost = (shared * squares.numel() * info.tiny) ** 0.5
    return Roots(*(part.sqrt() * factor + lost for part in (total, columns, rows if outputs else none)))


def _above(value: float, like: Tensor) -> Tensor:
    """A tensor of one entry, of the type of ``like``, that is at least ``value``."""
    info = torch.finfo(like.dtype)
    raised = max(value * (1 + 8 * info.eps), info.tiny) if value > 0 else value
    return like.new_full((), raised if raised <= info.max else float("inf"))


def _anchor(kernel: Kernel, state: State, warm: bool) -> None:
    """Write the weight and the roots of its certified norms into the buffers; those that are empty are not tracked."""
    anchor, root_total, root_inputs, root_outputs, direction = state

    def root(norm_sq: Tensor, dtype: torch.dtype) -> Tensor:
        return round_up(to_float64(norm_sq).sqrt() * (1 + 4 * EPS), dtype).to(anchor.device)

    anchor.copy_(kernel.weight)
    with torch.autocast(anchor.device.type, enabled=False):
        if kernel.geometry is not None:
            total = kernel.certified()
        else:
            total, vector = top_singular(
                kernel.weight, rtol=WARM_RTOL if warm else COLD_RTOL, start=direction if warm else None
            )
            direction.copy_(vector)
        root_total.copy_(root(total, root_total.dtype))
        if root_inputs.numel():
            root_inputs.copy_(root(kernel.input_norms_sq(), root_inputs.dtype))
        if root_outputs.numel():
            root_outputs.copy_(root(kernel.output_norms_sq(), root_outputs.dtype))


@torch.library.custom_op("minimand::renew_anchor", mutates_args=STATE)
def _renew(
    weight: Tensor,
    anchor: Tensor,
    root_total: Tensor,
    root_inputs: Tensor,
    root_outputs: Tensor,
    direction: Tensor,
    tolerance: float,
    code: list[int],
) -> None:
    """Renew the reference when the weight has moved too far. A custom op hides this branch from the compiler."""
    kernel = decode(weight, code)
    if not _total_drift(kernel, anchor) <= tolerance * float(root_total):
        warm = tolerance > 0 and bool(root_total > 0)
        _anchor(kernel, (anchor, root_total, root_inputs, root_outputs, direction), warm)
