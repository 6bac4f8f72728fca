"""A bound on a layer's norm that stays valid while its weight moves."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..errors import CapabilityError, OptionError, is_traced, require_finite
from .base import Bounds, LinearOperator
from .conv import Convolution
from .dense import Dense
from .opaque import decode, encode
from .spectral import EPS, round_up, to_float64

__all__ = ["LipschitzTracker"]

POLICIES = ("drift", "manual")


class Roots(NamedTuple):
    """Norms, or drifts of norms: of the whole operator, per input, per output."""

    total: Tensor
    inputs: Tensor
    outputs: Tensor


class LipschitzTracker(nn.Module):
    r"""Bounds on :math:`\|A\|^2` and its parts, never below the truth while the weight :math:`W` moves.

    A certified bound :math:`L_0` is kept with the weight :math:`W_0` it was computed for. Since
    :math:`W \mapsto A` is linear and :math:`\|A\| \le \sqrt{r}\,\|W\|_F`,

    .. math:: \sqrt{\hat L} = \sqrt{L_0} + \sqrt{r}\, \|W - W_0\|_F \ge \|A\|,

    where :math:`r` is the number of windows that share one input: 1 for a dense weight, :math:`k_h k_w` for
    a convolution, :math:`\lceil k_h/s \rceil \lceil k_w/s \rceil` with a stride
    (:math:`\|Ay\|^2 = \sum_p \|W y_p\|^2 \le \|W\|_2^2 \sum_p \|y_p\|^2`, and each input lies in at most
    :math:`r` of the windows :math:`y_p`). With groups the norm is the largest group's. It depends on the
    values of :math:`W` only, so in-place edits, ``.data``, ``load_state_dict`` and optimizers are all seen.

    - ``refresh="drift"``: :math:`W_0, L_0` are renewed when the second term exceeds ``tolerance`` times the
      first (by default 0.18 for dense weights, 0.1 for convolutions, whose :math:`L_0` is less tight).
    - ``refresh="manual"``: the bound is :math:`L_0` of the last :meth:`refresh`, as in Bibi et al. 2019,
      who renew it once an epoch. **Unsafe**: early in training the truth can be several times larger, and
      the step is then too long.

    ``inputs`` and ``outputs`` say whose norms are tracked besides the whole operator's. A layer passes its
    own weight to :meth:`bounds`; its tracker can then be built on a weight on the meta device. State is in
    non-persistent buffers: it moves and copies with the module and leaves ``state_dict`` empty. While
    compiling, the renewal is an opaque operator; while exporting, only the formula is traced, so run the
    module once before.

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

    def __init__(
        self,
        operator: LinearOperator,
        *,
        refresh: str = "drift",
        tolerance: float | None = None,
        inputs: bool = False,
        outputs: bool = False,
    ) -> None:
        super().__init__()
        if refresh not in POLICIES:
            raise OptionError(f"refresh must be one of {', '.join(POLICIES)}, got {refresh!r}")
        if not isinstance(operator, Dense | Convolution):
            raise CapabilityError(
                f"LipschitzTracker follows a Dense, Conv1d or Conv2d, got a {type(operator).__name__}; "
                f"call its norm_sq() whenever the weight changes instead"
            )
        self.operator = operator
        self.policy = refresh
        self.tolerance = tolerance if tolerance is not None else 0.18 if isinstance(operator, Dense) else 0.1
        self.inputs = inputs
        self.outputs = outputs
        self.refreshes = 0
        self._reset(operator.weight)

    def bound(self) -> Tensor:
        r"""A bound on :math:`\|A\|^2` for the operator's present weight; a constant for autograd."""
        return self.bounds().total

    @torch.no_grad()
    def bounds(self, weight: Tensor | None = None) -> Bounds:
        """The bounds for ``weight``, by default the operator's own; constants for autograd."""
        weight = self.operator.weight.detach() if weight is None else weight.detach()
        if weight.shape != self.anchor.shape or weight.dtype != self.anchor.dtype:
            self._reset(weight)
        if self.policy == "manual":
            if self.refreshes == 0 and not is_traced(weight):
                self.refresh(weight)
            return self._squared(weight, None)
        # In evaluation the bound is the weight's own, whatever way led there: equal weights, equal answers.
        tolerance = self.tolerance if self.training else 0.0
        if not is_traced(weight):
            drift = self._drift(weight)
            # Written so that NaN refreshes too: the certificate then names the weight.
            if self.refreshes == 0 or not bool(drift.total <= tolerance * self.root_total):
                self.refresh(weight)
                drift = self._drift(weight)
            return self._squared(weight, drift)
        if not torch.compiler.is_exporting() and torch.compiler.is_compiling():
            _renew(weight, *self._state(), tolerance, self.inputs, self.outputs, *encode(self.operator))
        return self._squared(weight, self._drift(weight))

    @torch.no_grad()
    def refresh(self, weight: Tensor | None = None) -> Self:
        """Certify ``weight`` (by default the operator's own) and make it the new reference."""
        weight = self.operator.weight.detach() if weight is None else weight.detach()
        if weight.shape != self.anchor.shape or weight.dtype != self.anchor.dtype:
            self._reset(weight)
        require_finite("the weight of the tracked operator", weight)
        _anchor(self.operator.with_weight(weight), *self._state(), self.inputs, self.outputs)
        self.refreshes += 1
        return self

    def _state(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.anchor, self.root_total, self.root_inputs, self.root_outputs

    def _reset(self, weight: Tensor) -> None:
        """Anchor at zero, whose norm is zero: a valid, if loose, reference that costs nothing."""
        device = None if weight.device.type == "meta" else weight.device
        inputs = self.operator.inputs if self.inputs else 0
        outputs = self.operator.outputs if self.outputs else 0
        values = (
            torch.zeros(shape, dtype=weight.dtype, device=device) for shape in (weight.shape, (), inputs, outputs)
        )
        for name, value in zip(("anchor", "root_total", "root_inputs", "root_outputs"), values, strict=True):
            self.register_buffer(name, value, persistent=False)
        self.refreshes = 0

    def _drift(self, weight: Tensor) -> Roots:
        return _drift(weight, self.anchor, self.operator, self.inputs, self.outputs)

    def _squared(self, weight: Tensor, drift: Roots | None) -> Bounds:
        work = torch.promote_types(weight.dtype, torch.float32)
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
        """Move or cast the buffers; a cast moves the anchor, so its norms grow by what that may add."""
        before = self._state()
        super()._apply(fn, recurse)
        if self.anchor.is_meta or before[0].is_meta or self.anchor.dtype == before[0].dtype:
            return self
        old = before[0].to(self.anchor.device)
        moved = _drift(self.anchor.double(), old.double(), self.operator, self.inputs, self.outputs)
        for new, root, extra in zip(self._state()[1:], before[1:], moved, strict=True):
            if new.numel():
                new.copy_(round_up(root.to(new.device).double() + extra, new.dtype))
        return self


def _drift(weight: Tensor, anchor: Tensor, operator: LinearOperator, inputs: bool, outputs: bool) -> Roots:
    """How much the norms may have grown from ``anchor`` to ``weight``."""
    work = torch.promote_types(weight.dtype, torch.float32)
    delta = weight.to(work) - anchor.to(work)
    groups, shared = (1, 1)
    if isinstance(operator, Convolution):
        groups, shared = operator.geometry.groups, min(operator.geometry.overlaps())
    # Norms of norms: one flat sum of millions of float32 squares is off by a per cent.
    rows = torch.linalg.vector_norm(delta.flatten(1), dim=1)
    total = torch.linalg.vector_norm(rows.unflatten(0, (groups, -1)), dim=1).amax(0)
    info = torch.finfo(work)
    factor = shared**0.5 * (1 + (delta[0].numel() + delta.shape[0] + 16) * info.eps)
    none = rows.new_zeros(0)
    columns = none
    if inputs:
        per_group = delta.flatten(2) if delta.dim() > 2 else delta.unsqueeze(-1)
        taps = torch.linalg.vector_norm(per_group, dim=-1).unflatten(0, (groups, -1))
        columns = torch.linalg.vector_norm(taps, dim=1).flatten()
    return Roots(*(factor * part for part in (total, columns, rows if outputs else none)))


def _anchor(
    operator: LinearOperator,
    anchor: Tensor,
    root_total: Tensor,
    root_inputs: Tensor,
    root_outputs: Tensor,
    inputs: bool,
    outputs: bool,
) -> None:
    """Write the operator's weight and the roots of its certified norms into the buffers."""

    def root(norm_sq: Tensor, dtype: torch.dtype) -> Tensor:
        return round_up(to_float64(norm_sq).sqrt() * (1 + 4 * EPS), dtype).to(anchor.device)

    anchor.copy_(operator.weight)
    with torch.autocast(anchor.device.type, enabled=False):
        root_total.copy_(root(operator.norm_sq(), root_total.dtype))
        if inputs:
            root_inputs.copy_(root(operator.input_norms_sq(), root_inputs.dtype))
        if outputs:
            root_outputs.copy_(root(operator.output_norms_sq(), root_outputs.dtype))


@torch.library.custom_op("minimand::renew_anchor", mutates_args=("anchor", "root_total", "root_inputs", "root_outputs"))
def _renew(
    weight: Tensor,
    anchor: Tensor,
    root_total: Tensor,
    root_inputs: Tensor,
    root_outputs: Tensor,
    tolerance: float,
    inputs: bool,
    outputs: bool,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    size: list[int],
) -> None:
    """Renew the reference when the weight has moved too far; opaque to a compiler, so free to branch."""
    operator = decode(weight, stride, padding, dilation, groups, size)
    if not bool(_drift(weight, anchor, operator, False, False).total <= tolerance * root_total):
        _anchor(operator, anchor, root_total, root_inputs, root_outputs, inputs, outputs)
