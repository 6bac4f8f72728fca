"""A bound on the norm of a layer that holds while its weight changes."""

import math
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.utils._python_dispatch import _disable_current_modes

from ..arguments import checked
from ..errors import CapabilityError, OptionError, Sealed, require_finite, require_positive
from ..tracing import exporting_to_onnx, is_compiled, is_traced, unwrapped
from .exporting import traced_values
from .kernel import Bounds, Kernel, decode, encode
from .lipschitz import Bounded
from .spectral import EPS, product_of_bounds, round_up, to_float64, top_singular

__all__ = ["LipschitzTracker"]

POLICIES = ("drift", "quick", "manual")
COLD_RTOL = 1e-3
WARM_RTOL = 5e-3  # of a renewal during training, where the drift term is larger than this
QUICK = 0.1  # share of the tolerance at which a quick bound is replaced
# Between these, a float32 sum of squares has neither underflowed nor overflowed.
TRUSTED = (1e-10, 1e15)
FLAT = 1 << 18  # entries up to which one flat float32 sum is accurate enough
FLOAT32_EPS = torch.finfo(torch.float32).eps
PROBED = 16  # entries of a weight that are compared with zero first


class CertifiedWeight(NamedTuple):
    """A weight, bounds on its norms (whole, per input, per output), and an estimate of its first singular vector.

    They are views of one tensor, so that a weight and its bounds are published in one assignment.
    """

    weight: Tensor
    total: Tensor
    inputs: Tensor
    outputs: Tensor
    direction: Tensor


@checked
class LipschitzTracker(Sealed, nn.Module):
    r"""Bounds on :math:`\|A\|^2` and its parts that are never below the truth while the weight :math:`W` changes.

    The tracker keeps a certified bound :math:`L_0` and the weight :math:`W_0` that it belongs to. Since
    :math:`W \mapsto A` is linear and :math:`\|A\| \le \sqrt{r}\,\|W\|_F`,

    .. math:: \sqrt{\hat L} = \sqrt{L_0} + \sqrt{r}\, \|W - W_0\|_F \ge \|A\|,

    where :math:`r` is the number of windows that share one input: 1 for a dense weight, :math:`k_h k_w` for
    a convolution, :math:`\lceil k_h/s \rceil \lceil k_w/s \rceil` with a stride
    (:math:`\|Ay\|^2 = \sum_p \|W y_p\|^2 \le \|W\|_2^2 \sum_p \|y_p\|^2`, and each input lies in at most
    :math:`r` of the windows :math:`y_p`). With groups the norm is that of the largest group. The bound depends on
    the values of :math:`W` only, so that it follows in-place edits, ``.data``, ``load_state_dict`` and optimizers. An
    operator holds one tensor; a function in its place, ``lambda: Dense(net.fc.weight)``, follows new Parameters, too.

    - ``refresh="drift"``: :math:`W_0, L_0` are renewed when the second term exceeds ``tolerance`` times the
      first (by default 0.18 for dense weights, 0.1 for convolutions, whose :math:`L_0` is less tight). In training the
      first :math:`L_0` of a convolution that is expensive to certify is a quick one, up to about eight times the truth;
      it is replaced at a tenth of the tolerance, after the first steps of an optimizer. The replacement depends on
      the weights alone, so that runs are reproducible and recomputations find the bounds of the forward pass. Call
      :meth:`refresh` to certify at once.
    - ``refresh="quick"``: as ``"drift"``, but a bound that is expensive to certify is always a quick one, that of
      a large dense weight included. Layers that start from the plain one and take a share of the step use it.
    - ``refresh="manual"``: the bound is :math:`L_0` of the last :meth:`refresh`, as in [Bibi2019],
      where it is renewed once an epoch. **Unsafe**: early in training the truth can be several times larger, and
      the step is then too long.

    ``inputs`` and ``outputs`` switch on bounds per input and per output feature. A layer passes its own weight to
    :meth:`bounds`, so that its tracker can be built with a weight on the meta device. :math:`W_0` and its bounds are
    one non-persistent buffer: it moves and is copied with the module, and ``state_dict`` stays empty. A renewal
    replaces this buffer in one assignment, so that several threads may use one tracker. In a compiled graph and under
    torch.func the renewal is a custom operator. An exported program holds the formula with the weight at export as
    :math:`W_0`. In training, a renewal of a dense weight starts from the last singular vector and is half a per cent
    looser; in evaluation the bound depends on the weight alone.

    >>> from minimand.operators import Dense
    >>> A = Dense(torch.eye(3))
    >>> tracker = LipschitzTracker(A)
    >>> before = tracker.bound()
    >>> _ = A.weight.mul_(2.0)
    >>> bool(1 <= before < 1.01), bool(4 <= tracker.bound() < 4.04)
    (True, True)
    """

    _settable = ("reference", "refreshes")
    reference: Tensor
    refreshes: int

    def __init__(
        self,
        operator: Bounded | Callable[[], Bounded],
        *,
        refresh: str = "drift",
        tolerance: float | None = None,
        inputs: bool = False,
        outputs: bool = False,
    ) -> None:
        super().__init__()
        if refresh not in POLICIES:
            raise OptionError(f"refresh must be one of {', '.join(POLICIES)}, got {refresh!r}")
        self.operator = operator
        kernel = getattr(self.operator, "kernel", None)
        if kernel is None:
            raise CapabilityError(
                f"LipschitzTracker takes a Dense or a convolution, got a {type(self.operator).__name__}; "
                f"wrap a weight in minimand.operators.Dense, or call norm_sq() of another operator whenever it changes"
            )
        if tolerance is not None:
            require_positive("tolerance", tolerance, zero=True)
        self._geometry = kernel.geometry
        self.policy = refresh
        self.tolerance = tolerance if tolerance is not None else 0.18 if kernel.geometry is None else 0.1
        self.parts = [inputs, outputs, refresh == "quick"]
        self._reset(kernel.weight)

    @property
    def operator(self) -> Any:
        """The operator whose weight is bounded; assign an operator, or a function that returns the present one."""
        return self._source() if isinstance(self._source, MethodType | FunctionType) else self._source

    @operator.setter
    def operator(self, operator: Any) -> None:
        self._source = operator

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
        # The buffer is read once, and never written to: another thread may replace it at any time.
        packed = self.reference
        if weight.shape != self._shape or packed.dtype != weight.dtype or packed.device != weight.device:
            packed = self._reset(weight)
        # In evaluation equal weights must have equal bounds, whatever weights came before.
        tolerance = math.inf if self.policy == "manual" else self.tolerance if self.training else 0.0
        if is_traced(weight):
            return self._traced(kernel, packed, tolerance)
        bounds, current = _current(kernel, packed, tolerance, self.parts)
        if current is not packed:
            self.reference, self.refreshes = current, self.refreshes + 1
        return bounds

    def fresh(self) -> "LipschitzTracker":
        """A tracker with the same options that has certified nothing yet."""
        other = LipschitzTracker(
            self.operator, refresh=self.policy, tolerance=self.tolerance, inputs=self.parts[0], outputs=self.parts[1]
        )
        return other.train(self.training)

    @torch.no_grad()
    def refresh(self, weight: Tensor | None = None) -> Self:
        """Certify ``weight`` (by default the operator's) and make it the new reference."""
        weight = self.operator.weight.detach() if weight is None else weight.detach()
        self.reference = _certify(Kernel(weight, self._geometry), self.parts, quick=self.parts[2])
        self.refreshes += 1
        return self

    def _traced(self, kernel: Kernel, packed: Tensor, tolerance: float) -> Bounds:
        given = kernel.weight, packed, tolerance, self.parts, encode(self._geometry)
        if is_exporting() if is_dynamo_compiling() else is_compiled(kernel.weight):
            # Not the operator: the weights of a program may change, and it does not import this library.
            constant = _exported(*given)
            if constant is None and self.refreshes == 0 and is_exporting():
                raise CapabilityError(
                    "torch.export cannot read the weight here, and a bound from its entries alone is loose; run the "
                    "layer once before exporting it"
                )
            # The weights of an ONNX file are constants.
            fixed = math.inf if constant is not None and exporting_to_onnx() else tolerance
            return _formula(kernel, packed if constant is None else constant, self.parts, fixed)
        flat, current = _tracked(*given)
        if is_dynamo_compiling():
            self.reference = current
        total, inputs, outputs = flat.split(_sizes(kernel, self.parts)[1:4])
        return Bounds(total[0], inputs if self.parts[0] else None, outputs if self.parts[1] else None)

    def _reset(self, weight: Tensor) -> Tensor:
        """Use a zero weight as the reference: its norm is zero, which is valid and needs no computation."""
        device = None if weight.device.type == "meta" else weight.device
        size = sum(_sizes(Kernel(weight, self._geometry), self.parts))
        packed = torch.zeros(size, dtype=weight.dtype, device=device)
        self.register_buffer("reference", packed, persistent=False)
        self._shape, self.refreshes = weight.shape, 0
        return packed

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move the buffer; one that does not keep its values, as after a cast or ``to_empty``, becomes zero."""
        before, after = self.reference, fn(self.reference)
        kept = before.dtype == after.dtype and not before.is_meta and not after.is_meta
        if not kept or not torch.equal(after, before.to(after.device)):
            after, self.refreshes = after if after.is_meta else torch.zeros_like(after), 0
        self.reference = after
        return self


def _sizes(kernel: Kernel, parts: list[bool]) -> tuple[int, int, int, int, int]:
    """The numbers of entries of a reference's parts."""
    # A convolution has one number in place of a direction: 1 if its bound is a quick one.
    side = min(kernel.weight.shape) if kernel.geometry is None else 1
    return kernel.weight.numel(), 1, kernel.inputs if parts[0] else 0, kernel.outputs if parts[1] else 0, side


def _unpack(packed: Tensor, kernel: Kernel, parts: list[bool]) -> CertifiedWeight:
    """Views of a packed reference to a weight of the kernel's size."""
    weight, total, *others = packed.split(_sizes(kernel, parts))
    return CertifiedWeight(weight.view(kernel.weight.shape), total[0], *others)


def _formula(kernel: Kernel, packed: Tensor, parts: list[bool], tolerance: float = 0.0) -> Bounds:
    """The bounds without a renewal, however far the weight has moved; within an infinite tolerance it has not."""
    reference = _unpack(packed, kernel, parts)
    drift = _drift(kernel, reference.weight, parts) if tolerance < math.inf else None
    return _squared(reference, drift, parts)


def _squared(reference: CertifiedWeight, drift: list[Tensor] | None, parts: list[bool]) -> Bounds:
    """The bounds that norms and their drifts imply."""
    # In its own type the square of a small number may be zero.
    dtype, device = reference.weight.dtype, reference.weight.device
    work = torch.float32 if device.type == "mps" else torch.float64
    slack = 1 + 8 * torch.finfo(work).eps
    roots = [root.to(work) for root in reference[1:4]]
    if drift is not None:
        roots = [root + moved.to(work) for root, moved in zip(roots, drift, strict=True)]
    wanted = zip(roots, (True, *parts[:2]), strict=True)
    square = torch.square if work != dtype else lambda root: product_of_bounds(root, root)
    return Bounds._make(round_up((square(root) * slack).double(), dtype) if some else None for root, some in wanted)


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
    return float(_drift(kernel, anchor, [False, False])[0])


def _drift(kernel: Kernel, anchor: Tensor, parts: list[bool], precision: torch.dtype = torch.float64) -> list[Tensor]:
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
    columns = per_input.unflatten(0, (groups, -1)).sum(1).flatten() if any(parts[:2]) else none
    sides = zip((rows, columns) if kernel.transposed else (columns, rows), parts[:2], strict=True)
    factor = shared**0.5 * (1 + (squares[0].numel() + len(rows) + 16) * info.eps + torch.finfo(work).eps)
    # A square below the smallest normal number may have been lost.
    lost = (shared * squares.numel() * info.tiny) ** 0.5
    return [part.sqrt() * factor + lost for part in (total, *(side if some else none for side, some in sides))]


def _above_square(root: float, like: Tensor) -> Tensor:
    """A tensor of one entry, of the type of ``like``, that is at least the square of ``root``."""
    info = torch.finfo(like.dtype)
    raised = max(root * root * (1 + 8 * info.eps), info.tiny) if root > 0 else root
    return like.new_full((), raised if raised <= info.max else float("inf"))


def _current(kernel: Kernel, packed: Tensor, tolerance: float, parts: list[bool]) -> tuple[Bounds, Tensor]:
    """The bounds, and the reference to which they refer: a new one if the weight has moved too far from ``packed``."""
    weight, size = kernel.weight, kernel.weight.numel()
    known, fixed = float(packed[size]), tolerance == math.inf
    if fixed or (known == 0 and bool(weight.flatten()[:PROBED].any())):
        # A reference of norm zero is zero, and most often the first one: it is not read entry by entry.
        moved = 0.0 if known > 0 else math.inf
    else:
        moved = _total_drift(kernel, packed[:size].view(weight.shape))
    # A bound that is quick at first only.
    quick = kernel.geometry is not None and not parts[2] and float(packed[-1]) > 0
    # Written so that NaN renews, too: the certificate then raises an error that names the weight.
    if not moved <= tolerance * known * (QUICK if quick else 1.0) or (quick and tolerance == 0):
        warm = tolerance > 0 and known > 0
        first = parts[2] or (kernel.geometry is not None and 0 < tolerance < math.inf and known == 0)
        packed = _certify(kernel, parts, _unpack(packed, kernel, parts).direction if warm else None, quick=first)
        moved, known = 0.0, float(packed[size])
    if any(parts[:2]):
        trusted = weight.dtype == torch.float32 and TRUSTED[0] < moved < TRUSTED[1]
        precision, reference = torch.float32 if trusted else torch.float64, _unpack(packed, kernel, parts)
        drift = _drift(kernel, reference.weight, parts, precision) if moved else None
        return _squared(reference, drift, parts), packed
    # Python numbers: ten operations on tensors of one entry would take longer than the drift.
    return Bounds(_above_square(known + moved, weight)), packed


def _certify(kernel: Kernel, parts: list[bool], start: Tensor | None = None, *, quick: bool = False) -> Tensor:
    """The kernel's weight as a new reference; a dense norm is found from the singular vector ``start``, if given. With
    ``quick`` a bound that is expensive to certify is a looser one at first."""
    # A normal tensor, which compiled graphs take, too; a copy, because another thread may change the weight meanwhile.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(kernel.device.type, enabled=False):
        packed = kernel.weight.new_empty(sum(_sizes(kernel, parts)))
        made = _unpack(packed, kernel, parts)
        weight, none = made.weight.copy_(kernel.weight), packed[:0]
        kernel = kernel.with_weight(weight)
        require_finite("the weight", weight)
        if quick and (looser := kernel.quick()) is not None:
            total = looser.sqrt() * (1 + 4 * EPS)
            # A part is as far from zero as its weight.
            trusted = weight.dtype == torch.float32 and TRUSTED[0] < float(total) < TRUSTED[1]
            precision = torch.float32 if trusted else torch.float64
            parted = _drift(kernel, torch.zeros_like(weight), parts, precision)[1:] if any(parts[:2]) else (none, none)
            for part, root in zip(made[1:4], (total, *parted), strict=True):
                part.copy_(round_up(to_float64(root), weight.dtype))
            made.direction.fill_(1)
            return packed
        if kernel.geometry is not None:
            total, direction = kernel.certified(), weight.new_zeros(1)
        else:
            total, direction = top_singular(weight, rtol=COLD_RTOL if start is None else WARM_RTOL, start=start)
        columns = kernel.input_norms_sq() if parts[0] else none
        rows = kernel.output_norms_sq() if parts[1] else none
        for part, norm_sq in zip(made[1:4], (total, columns, rows), strict=True):
            part.copy_(round_up(to_float64(norm_sq).sqrt() * (1 + 4 * EPS), weight.dtype))
        made.direction.copy_(direction)
        return packed


@torch.library.custom_op("minimand::tracked_bounds", mutates_args=())
def _tracked(
    weight: Tensor, packed: Tensor, tolerance: float, parts: list[bool], code: list[int]
) -> tuple[Tensor, Tensor]:
    """All bounds in one tensor, and the reference to which they refer."""
    bounds, current = _current(decode(weight, code), packed, tolerance, parts)
    flat = torch.cat([part.reshape(-1) for part in bounds if part is not None])
    return flat, current.clone() if current is packed else current


@_tracked.register_fake
def _(weight: Tensor, packed: Tensor, tolerance: float, parts: list[bool], code: list[int]) -> tuple[Tensor, Tensor]:
    return weight.new_empty(sum(_sizes(decode(weight, code), parts)[1:4])), torch.empty_like(packed)


@_tracked.register_vmap
def _(info: Any, dims: tuple[int | None, ...], weight: Tensor, packed: Tensor, *options: Any) -> tuple[Any, Any]:
    both = zip((weight, packed), dims[:2], strict=True)
    rows = [[each] * info.batch_size if dim is None else each.unbind(dim) for each, dim in both]
    found = [_tracked(*pair, *options) for pair in zip(*rows, strict=True)]
    return tuple(map(torch.stack, zip(*found, strict=True))), (0, 0)


def _exported(weight: Tensor, packed: Tensor, tolerance: float, parts: list[bool], code: list[int]) -> Tensor | None:
    """The reference to the value that a weight has while ``torch.export`` traces it; None if it has none."""
    values = traced_values(weight, packed)
    if values is None:
        return None
    with _disable_current_modes():
        current = _current(decode(values[0], code), values[1], tolerance, parts)[1]
    return packed if current is values[1] else current


# As torch.compiler.assume_constant_result does, which imports the compiler.
_exported._dynamo_marked_constant = True  # type: ignore[attr-defined]
