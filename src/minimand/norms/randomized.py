r"""An upper bound on the norm of a linear map that is given by two callables, by Lanczos with random starts.

The bound fails with a probability that is stated. Nothing better is possible from products alone: no number of products
with deterministically chosen vectors bounds the norm (Kuczyński & Woźniakowski 1992).
"""

import contextlib
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils._python_dispatch import _disable_current_modes

from ..arguments import checked
from ..errors import CapabilityError, OptionError, ShapeError, require_finite
from ..tracing import is_compiled
from .spectral import certified_norm_sq, in_range, lanczos, product_of_bounds, to_float64

__all__ = ["FAILURE", "lanczos_factor", "lanczos_steps", "randomized_norm_sq"]

FAILURE = 1e-10
RTOL = 0.1
STARTS = 4
SEED = 0
BASIS = 1 << 23  # entries of the Krylov bases that are held at the same time; one basis is always held

Map = Callable[[Tensor], Tensor]


def lanczos_factor(n: int, steps: int, failure: float = FAILURE, starts: int = STARTS) -> float:
    r"""The factor :math:`1/(1-\varepsilon)` from a Lanczos estimate to an upper bound on :math:`\lambda_{\max}`.

    Theorem (Kuczyński & Woźniakowski, *Estimating the largest eigenvalue by the power and Lanczos algorithms with a
    random start*, SIAM J. Matrix Anal. Appl. 1992). Let M be a symmetric positive semidefinite n × n matrix and
    :math:`\xi` the largest Ritz value after k steps of Lanczos from a start that is uniform on the sphere. For every
    :math:`0 < \varepsilon < 1`,

    .. math:: P\bigl(\xi < (1 - \varepsilon)\,\lambda_{\max}(M)\bigr)
              \le 1.648\,\sqrt n\; e^{-\sqrt\varepsilon\,(2k - 1)} .

    The largest :math:`\xi` of s independent starts fails with at most the s-th power of this probability. For a failure
    probability of :math:`\delta` therefore

    .. math:: \varepsilon = \Bigl(\frac{\ln(1.648\,\sqrt n\,/\,\delta^{1/s})}{2k - 1}\Bigr)^2 .

    Where this is 1 or more the factor is infinite. The theorem holds whatever the eigenvalues and their gaps are, and
    assumes exact arithmetic.

    Proof for :math:`n \ge 3`, with :math:`\lambda_{\max} = 1` and the start b in the eigenbasis. A failure means
    :math:`\sum_i (\lambda_i - 1 + \varepsilon)\,q(\lambda_i)^2 b_i^2 < 0` for all polynomials q of degree k − 1. For
    the q with :math:`\sqrt{1-s}\,q((1-\varepsilon)s) = T_{2k-1}(\sqrt{1-s})`, T a Chebyshev polynomial, this implies
    :math:`b_1^2/(1 - b_1^2) < 1/\sinh^2 z` with :math:`z = (2k-1)\operatorname{artanh}\sqrt\varepsilon`, that is
    :math:`|b_1| < 1/\cosh z`. The density of :math:`b_1` is at most :math:`\sqrt{n/2\pi}`, so the probability is at
    most :math:`\sqrt{2n/\pi}/\cosh z \le 1.596\sqrt n\,e^{-z}`, and :math:`z \ge (2k-1)\sqrt\varepsilon`.

    >>> round(lanczos_factor(10_000, 19), 3)
    1.094
    """
    exponent = math.log(1.648 * math.sqrt(n)) - math.log(failure) / starts
    epsilon = (exponent / (2 * steps - 1)) ** 2
    return 1 / (1 - epsilon) if epsilon < 1 else math.inf


def lanczos_steps(n: int, factor: float = 1 + RTOL, failure: float = FAILURE, starts: int = STARTS) -> int:
    """The smallest number of steps for which :func:`lanczos_factor` is at most ``factor``."""
    exponent = math.log(1.648 * math.sqrt(n)) - math.log(failure) / starts
    return math.ceil((exponent / math.sqrt(1 - 1 / factor) + 1) / 2)


@checked
def randomized_norm_sq(
    apply: Map,
    adjoint: Map,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    *,
    failure: float = FAILURE,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""A bound on :math:`\|A\|^2`, within 10 % of the truth, that is too small with probability at most ``failure``.

    ``apply`` and ``adjoint`` take batches: ``(batch, *input_shape)`` to ``(batch, *output_shape)`` and back. Where the
    smaller side of A has no more entries than Lanczos would take products, the matrix is formed and its norm is
    certified, without randomness. Otherwise :math:`\xi` is the largest Ritz value of 4 Lanczos runs on the smaller of
    :math:`AA^\top` and :math:`A^\top A`, in one batch where memory allows, and the bound is :math:`\xi` times
    :func:`lanczos_factor`.

    The products are computed in float64 where the callables take it and return it; otherwise in ``dtype``, torch's
    default type unless given. Assumptions: the callables are linear, ``adjoint`` is the adjoint of ``apply``
    (:func:`minimand.operators.check_operator` tests it), and the relative error of a product is at most
    :math:`8u + 2(m+n)\,u_{32}` for the rounding unit u of the type and :math:`u_{32}` of its sums (float32 for half
    precision); the bound is raised by twice that. Starts come from ``generator``, by default from a fixed seed: equal
    maps then have equal bounds, and the probability is over maps that do not depend on the seed. A compiled graph
    breaks here; an exported program holds the bound as a constant.

    >>> weight = torch.diag(torch.linspace(1.0, 3.0, 200))
    >>> bound = randomized_norm_sq(lambda y: y @ weight.T, lambda x: x @ weight, (200,), (200,))
    >>> bool(9 <= bound <= 9.9)
    True
    """
    if is_dynamo_compiling():
        outside = torch.compiler.disable(randomized_norm_sq)
        options = {"failure": failure, "dtype": dtype, "device": device, "generator": generator}
        return outside(apply, adjoint, input_shape, output_shape, **options)
    if not 0 < failure < 1:
        raise OptionError(f"failure must be a probability in (0, 1), got {failure}")
    sides = math.prod(input_shape), math.prod(output_shape)
    n, device = min(sides), torch.empty(0, device=device).device
    if n == 0:
        return torch.zeros((), dtype=torch.float64, device=device)
    untraced = _disable_current_modes() if is_compiling() else contextlib.nullcontext()
    with untraced, torch.no_grad(), torch.autocast(device.type, enabled=False):
        into, out = _checked(apply, input_shape, output_shape), _checked(adjoint, output_shape, input_shape)
        work = _working_type(into, out, sides, dtype or torch.get_default_dtype(), device)
        first, second = (into, out) if sides[0] <= sides[1] else (out, into)
        info, sums = torch.finfo(work), torch.finfo(torch.promote_types(work, torch.float32))
        margin = 1 + 16 * info.eps + 4 * sum(sides) * sums.eps
        steps = lanczos_steps(n, failure=failure)
        if n <= STARTS * steps:
            matrix = first(torch.eye(n, dtype=work, device=device))
            require_finite("the operator's matrix", matrix)
            return certified_norm_sq(matrix) * margin

        start = torch.empty(STARTS, n, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
        start.normal_(generator=generator or torch.Generator(device).manual_seed(SEED))
        # The product with A and its adjoint would leave the range before the bound does.
        units = start / torch.linalg.vector_norm(start, dim=-1, keepdim=True)
        scale = in_range(first(units.to(work)), int(-math.log2(info.tiny)) // 5)[1]

        def normal(vectors: Tensor) -> Tensor:
            product = second(first(vectors.to(work)) / scale) / scale
            require_finite("the operator's product", product)
            return product.to(vectors)

        runs = start.split(max(1, BASIS // (n * steps)))
        values = torch.cat([to_float64(lanczos(normal, part, steps)[0]) for part in runs])
        bound = values.max().clamp_min(0) * lanczos_factor(n, steps, failure) * margin
        return product_of_bounds(bound, scale, scale)


def _checked(product: Map, given: tuple[int, ...], wanted: tuple[int, ...]) -> Map:
    """The callable on rows instead of samples, with its output's shape checked."""

    def rows(vectors: Tensor) -> Tensor:
        result = product(vectors.reshape(-1, *given))
        if is_compiled(result):
            raise CapabilityError(
                "torch.export cannot compute the norm of an operator that is made of tensors of the exported module; "
                "give the operator norm_sq"
            )
        if result.shape != (len(vectors), *wanted):
            raise ShapeError(
                f"a map from samples of {given} to samples of {wanted} returned shape {tuple(result.shape)} for "
                f"{len(vectors)} samples"
            )
        return result.reshape(len(vectors), -1)

    return rows


def _working_type(into: Map, out: Map, sides: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """float64 where both callables take and return it, else ``dtype``."""
    if device.type == "mps":
        return dtype
    try:
        results = [
            f(torch.zeros(1, n, dtype=torch.float64, device=device)) for f, n in zip((into, out), sides, strict=True)
        ]
    except (RuntimeError, TypeError):
        # torch raises one of these where captured tensors have another type.
        return dtype
    return torch.float64 if all(result.dtype == torch.float64 for result in results) else dtype
