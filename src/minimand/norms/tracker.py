"""A bound on the norm of a layer that holds while its weight changes."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..errors import CapabilityError, OptionError, is_traced, require_finite, require_positive, unwrapped
from .kernel import Bounds, Kernel, decode, encode
from .lipschitz import Bounded
from .spectral import EPS, round_up, to_float64, top_singular

__all__ = ["LipschitzTracker"]

POLICIES = ("drift", "manual")
COLD_RTOL = 1e-3
WARM_RTOL = 5e-3  # of a renewal during training, where the drift term is larger than this
# Between these, a float32 sum of squares has neither underflowed nor overflowed.
TRUSTED = (1e-10, 1e15)
FLAT = 1 << 18  # entries up to which one flat float32 sum is accurate enough
FLOAT32_EPS = torch.finfo(torch.float32).eps


class Roots(NamedTuple):
    """Norms, or drifts of norms: of the whole operator, per input, per output."""

    total: Tensor
    inputs: Tensor
    outputs: Tensor


class CertifiedWeight(NamedTuple):
    """A weight, upper bounds on the norms that it has, and an estimate of its first singular vector."""

    weight: Tensor
    roots: Roots
    direction: Tensor

    def pack(self) -> Tensor:
        """All entries in one tensor, so that a weight and its bounds are published in one assignment."""
        return torch.cat([self.weight.reshape(-1), *(part.reshape(-1) for part in self.roots), self.direction])


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
    :meth:`bounds`, so that its tracker can be built with a weight on the meta device. :math:`W_0` and its bounds are
    one non-persistent buffer: it moves and is copied with the module, and ``state_dict`` stays empty. A renewal
    replaces this buffer in one assignment, so that several threads may use one tracker. While compiling, the renewal
    is a custom operator. While exporting, only the formula is traced, so run the module once before. In training, a
    renewal of a dense weight starts from the last singular vector and is half a per cent looser; in evaluation the
    bound depends on the weight alone.

    >>> from minimand.operators import Dense
    >>> A = Dense(torch.eye(3))
    >>> tracker = LipschitzTracker(A)
    >>> before = tracker.bound()
    >>> _ = A.weight.mul_(2.0)
    >>> bool(1 <= before < 1.01), bool(4 <= tracker.bound() < 4.04)
    (True, True)
    """

    reference: Tensor

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
        kernel = getattr(operator, "kernel", None)
        if kernel is None:
            raise CapabilityError(
                f"LipschitzTracker takes a Dense, Conv1d or Conv2d, got a {type(operator).__name__}; "
                f"wrap a weight in minimand.operators.Dense, or call norm_sq() of another operator whenever it changes"
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
        given = self.operator.weight if weight is None else weight
        weight = unwrapped(given)
        if weight is not given and not is_traced(weight):
            # Derivatives by torch.func must not have other bounds than the backward pass.
            with temporarily_clear_interpreter_stack():
                return self.bounds(weight)
        weight = weight.detach()
        kernel = Kernel(weight, self._geometry)
        # The buffer is read once: another thread may replace it at any time.
        packed = self._fitting(kernel)
        if self.policy == "manual":
            if self.refreshes == 0 and not is_traced(weight):
                packed = self._renew(kernel, None)
            return _squared(weight, self._unpack(packed, kernel).roots, None, self.inputs, self.outputs)
        # In evaluation equal weights must have equal bounds, whatever weights came before.
        tolerance = self.tolerance if self.training else 0.0
        if not is_traced(weight):
            return self._renewed(kernel, packed, tolerance)
        if not torch.compiler.is_exporting() and torch.compiler.is_compiling():
            flat = _tracked(weight, packed, tolerance, self.inputs, self.outputs, encode(self._geometry))
            ends = (1, kernel.inputs if self.inputs else 0, kernel.outputs if self.outputs else 0)
            total, inputs, outputs = flat.split(ends)
            return Bounds(total[0], inputs if self.inputs else None, outputs if self.outputs else None)
        return self._formula(kernel, packed)

    @torch.no_grad()
    def refresh(self, weight: Tensor | None = None) -> Self:
        """Certify ``weight`` (by default the operator's) and make it the new reference."""
        weight = self.operator.weight.detach() if weight is None else weight.detach()
        self._renew(Kernel(weight, self._geometry), None)
        return self

    def _renew(self, kernel: Kernel, start: Tensor | None) -> Tensor:
        require_finite("the weight", kernel.weight)
        packed = _certify(kernel, self.inputs, self.outputs, start).pack()
        self.reference = packed
        self.refreshes += 1
        return packed

    def _renewed(self, kernel: Kernel, packed: Tensor, tolerance: float) -> Bounds:
        """The bounds, after a renewal if the weight has moved too far."""
        weight, size = kernel.weight, kernel.weight.numel()
        moved = _total_drift(kernel, packed[:size].view(weight.shape))
        known = float(packed[size])
        # Written so that NaN renews, too: the certificate then raises an error that names the weight.
        if not moved <= tolerance * known:
            start = self._unpack(packed, kernel).direction if tolerance > 0 and known > 0 else None
            packed, moved = self._renew(kernel, start), 0.0
            known = float(packed[size])
        if self.inputs or self.outputs:
            trusted = weight.dtype == torch.float32 and TRUSTED[0] < moved < TRUSTED[1]
            precision, reference = torch.float32 if trusted else torch.float64, self._unpack(packed, kernel)
            drift = _drift(kernel, reference.weight, self.inputs, self.outputs, precision) if moved else None
            return _squared(weight, reference.roots, drift, self.inputs, self.outputs)
        # Python numbers: ten operations on tensors of one entry would take longer than the drift.
        return Bounds(_above((known + moved) ** 2, weight))

    def _formula(self, kernel: Kernel, packed: Tensor) -> Bounds:
        """The bounds without a renewal, however far the weight has moved."""
        reference = self._unpack(packed, kernel)
        drift = _drift(kernel, reference.weight, self.inputs, self.outputs)
        return _squared(kernel.weight, reference.roots, drift, self.inputs, self.outputs)

    def _fitting(self, kernel: Kernel) -> Tensor:
        """The buffer, after a reset if it belongs to a weight of another size or type."""
        packed, weight = self.reference, kernel.weight
        if packed.numel() != sum(_sizes(kernel, self.inputs, self.outputs)) or packed.dtype != weight.dtype:
            return self._reset(weight)
        return packed

    def _reset(self, weight: Tensor) -> Tensor:
        """Use a zero weight as the reference: its norm is zero, which is valid and needs no computation."""
        device = None if weight.device.type == "meta" else weight.device
        size = sum(_sizes(Kernel(weight, self._geometry), self.inputs, self.outputs))
        packed = torch.zeros(size, dtype=weight.dtype, device=device)
        self.register_buffer("reference", packed, persistent=False)
        self.refreshes = 0
        return packed

    def _unpack(self, packed: Tensor, kernel: Kernel) -> CertifiedWeight:
        return _unpack(packed, kernel, self.inputs, self.outputs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move or cast the buffer. A cast changes the reference weight, and its norms are raised accordingly."""
        before = self.reference
        super()._apply(fn, recurse)
        after = self.reference
        if after.is_meta or before.is_meta or after.dtype == before.dtype:
            return self
        kernel = Kernel(self.operator.weight.detach(), self._geometry)
        old = self._unpack(before.to(after.device).double(), kernel)
        new = self._unpack(after, kernel)
        moved = _drift(Kernel(new.weight.double(), self._geometry), old.weight, self.inputs, self.outputs)
        raised = (round_up(root + extra, after.dtype) for root, extra in zip(old.roots, moved, strict=True))
        self.reference = new._replace(roots=Roots(*raised)).pack()
        return self


def _sizes(kernel: Kernel, inputs: bool, outputs: bool) -> tuple[int, int, int, int, int]:
    """The numbers of entries of a reference's parts."""
    side = min(kernel.weight.shape) if kernel.geometry is None else 0
    return kernel.weight.numel(), 1, kernel.inputs if inputs else 0, kernel.outputs if outputs else 0, side


def _unpack(packed: Tensor, kernel: Kernel, inputs: bool, outputs: bool) -> CertifiedWeight:
    """Views of a packed reference to a weight of the kernel's size."""
    weight, total, columns, rows, direction = packed.split(_sizes(kernel, inputs, outputs))
    return CertifiedWeight(weight.view(kernel.weight.shape), Roots(total[0], columns, rows), direction)


def _squared(weight: Tensor, roots: Roots, drift: Roots | None, inputs: bool, outputs: bool) -> Bounds:
    """The bounds that roots and drifts of norms imply, in the weight's type."""
    # The square of a small float32 number may be zero.
    work = torch.float32 if weight.device.type == "mps" else torch.float64
    slack = 1 + 8 * torch.finfo(work).eps

    def square(root: Tensor, moved: Tensor | None) -> Tensor:
        root = root.to(work)
        value = root if moved is None else root + moved.to(work)
        return round_up((value.square() * slack).to(torch.float64), weight.dtype)

    moved = (None, None, None) if drift is None else drift
    return Bounds(
        square(roots.total, moved[0]),
        square(roots.inputs, moved[1]) if inputs else None,
        square(roots.outputs, moved[2]) if outputs else None,
    )


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


def _certify(kernel: Kernel, inputs: bool, outputs: bool, start: Tensor | None) -> CertifiedWeight:
    """The kernel's weight as a new reference; a dense norm is found from the singular vector ``start``, if given."""
    weight = kernel.weight

    def root(norm_sq: Tensor) -> Tensor:
        return round_up(to_float64(norm_sq).sqrt() * (1 + 4 * EPS), weight.dtype).to(weight.device)

    none = weight.new_empty(0)
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        if kernel.geometry is not None:
            total, direction = kernel.certified(), none
        else:
            total, vector = top_singular(weight, rtol=COLD_RTOL if start is None else WARM_RTOL, start=start)
            direction = vector.to(weight)
        columns = root(kernel.input_norms_sq()) if inputs else none
        rows = root(kernel.output_norms_sq()) if outputs else none
        return CertifiedWeight(weight, Roots(root(total), columns, rows), direction)


#: Compiled graphs write the buffer in place, which no other thread may see half done.
_WRITING = threading.Lock()


@torch.library.custom_op("minimand::tracked_bounds", mutates_args=("packed",))
def _tracked(
    weight: Tensor,
    packed: Tensor,
    tolerance: float,
    inputs: bool,
    outputs: bool,
    code: list[int],
) -> Tensor:
    """All bounds in one tensor, after a renewal if the weight has moved too far."""
    kernel = decode(weight, code)
    with _WRITING:
        reference = _unpack(packed, kernel, inputs, outputs)
        known = float(reference.roots.total)
        if not _total_drift(kernel, reference.weight) <= tolerance * known:
            start = reference.direction if tolerance > 0 and known > 0 else None
            packed.copy_(_certify(kernel, inputs, outputs, start).pack())
        drift = _drift(kernel, reference.weight, inputs, outputs)
        bounds = _squared(weight, reference.roots, drift, inputs, outputs)
    return torch.cat([part.reshape(-1) for part in bounds if part is not None])


@_tracked.register_fake
def _(
    weight: Tensor,
    packed: Tensor,
    tolerance: float,
    inputs: bool,
    outputs: bool,
    code: list[int],
) -> Tensor:
    kernel = decode(weight, code)
    return weight.new_empty(sum(_sizes(kernel, inputs, outputs)[1:4]))
