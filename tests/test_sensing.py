"""What measures images: each operator against dense linear algebra, numpy's transforms and torch's layers."""

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimand.errors import OptionError, ShapeError
from minimand.operators import (
    BlockDCT,
    BlockSensing,
    Composed,
    Conv2d,
    Dense,
    Frame,
    Inpainting,
    SubsampledFourier,
    Transposed,
    Wavelet,
    cartesian_mask,
    gaussian_blur,
    orthonormal_gaussian,
    radial_mask,
)
from minimand.operators.sensing import is_orthonormal


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 100))
def test_rows_are_orthonormal(rows: int, more: int, seed: int) -> None:
    phi = orthonormal_gaussian(rows, rows + more, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(phi @ phi.mT, torch.eye(rows, dtype=torch.float64))
    assert is_orthonormal(phi)
    assert not is_orthonormal(1.1 * phi)


def test_orthonormal_rows_have_no_preferred_direction() -> None:
    """Uniform on the sphere: the mean of many first rows vanishes, their second moment is I/n."""
    draws = torch.stack(
        [orthonormal_gaussian(1, 3, generator=torch.Generator().manual_seed(k))[0] for k in range(3000)]
    )
    assert draws.mean(0).abs().max() < 0.04
    torch.testing.assert_close(draws.mT @ draws / len(draws), torch.eye(3) / 3, atol=0.03, rtol=0)


def test_block_sensing_is_the_strided_convolution() -> None:
    phi, x = torch.randn(5, 9, dtype=torch.float64), torch.randn(2, 1, 6, 12, dtype=torch.float64)
    blocks, layer = BlockSensing(phi, (6, 12)), Conv2d(phi.reshape(5, 1, 3, 3), (6, 12), stride=3)
    y = blocks.apply(x)
    torch.testing.assert_close(y, layer.apply(x))
    torch.testing.assert_close(blocks.adjoint(y), layer.adjoint(y))
    torch.testing.assert_close(y[1, :, 1, 2], phi @ x[1, 0, 3:6, 6:9].flatten())


def test_fourier_is_numpys_under_the_mask() -> None:
    mask = (torch.rand(6, 7) < 0.5).double()
    operator, x = SubsampledFourier(mask), torch.randn(3, 1, 6, 7, dtype=torch.float64)
    y = operator.apply(x)
    expected = np.fft.fft2(x[:, 0].numpy(), norm="ortho") * mask.numpy()
    np.testing.assert_allclose(y[:, 0].numpy() + 1j * y[:, 1].numpy(), expected, atol=1e-12)
    # All frequencies: the adjoint is the inverse.
    everything = SubsampledFourier(torch.ones(6, 7, dtype=torch.float64))
    torch.testing.assert_close(everything.adjoint(everything.apply(x)), x)


def test_half_precision_passes_through_the_fourier_transform() -> None:
    operator = SubsampledFourier(torch.ones(4, 4, dtype=torch.bfloat16))
    x = torch.rand(1, 1, 4, 4, dtype=torch.bfloat16)
    assert operator.adjoint(operator.apply(x)).dtype == torch.bfloat16


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5])
def test_masks_keep_their_share_and_the_centre(ratio: float, generator: torch.Generator) -> None:
    lines = cartesian_mask((32, 64), ratio, generator=generator)
    assert float(lines.mean()) == pytest.approx(ratio, abs=1 / 64)
    assert torch.equal(lines, lines[:1].expand_as(lines))
    spokes = radial_mask((64, 48), ratio)
    assert ratio <= float(spokes.mean()) < ratio + 0.06
    for mask in (lines, spokes):
        assert set(mask.unique().tolist()) <= {0.0, 1.0}
        assert mask[0, 0] == 1
    assert torch.equal(radial_mask((8, 8), 1.0), torch.ones(8, 8))


FRAMES = {
    "dct": BlockDCT((8, 12), block=4),
    "dct shifted": BlockDCT((8, 12), block=4, count=4),
    "dct padded": BlockDCT((7, 10), block=4, count=16),
    "haar": Wavelet((8, 12), levels=2, family="haar"),
    "db2 shifted": Wavelet((8, 12), levels=2, family="db2", count=4),
    "db4 padded": Wavelet((15, 17), levels=1, family="db4"),
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_frames_keep_every_energy(frame: Frame) -> None:
    if isinstance(frame, Wavelet):
        # The table of filters has 16 digits, float32 has seven.
        frame = frame.with_weight(torch.tensor(_table(frame.family), dtype=torch.float64))
    else:
        frame = frame.with_weight(torch.from_numpy(scipy.fft.dct(np.eye(frame.block), axis=0, norm="ortho")))
    n = frame.size[0] * frame.size[1]
    basis = torch.eye(n, dtype=torch.float64).reshape(n, *frame.input_shape)
    matrix = frame.apply(basis).flatten(1)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(n, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(frame.adjoint(frame.apply(basis)), basis, atol=1e-9, rtol=0)


def _table(family: str) -> tuple[float, ...]:
    from minimand.operators.frames import _FILTERS

    return _FILTERS[family]


def test_the_cosine_transform_is_scipys() -> None:
    x = torch.randn(1, 6, 6, dtype=torch.float64)
    frame = BlockDCT((6, 6), block=6)
    frame = frame.with_weight(frame.weight.double())
    np.testing.assert_allclose(frame.apply(x)[0].numpy(), scipy.fft.dctn(x[0].numpy(), norm="ortho"), atol=1e-6)


@pytest.mark.parametrize(("family", "degree"), [("haar", 0), ("db2", 1), ("db4", 3)])
def test_wavelets_do_not_see_polynomials(family: str, degree: int) -> None:
    """The vanishing moments: the high-pass of a polynomial is zero away from the border."""
    frame = Wavelet((32, 32), levels=1, family=family)  # type: ignore[arg-type]
    frame = frame.with_weight(torch.tensor(_table(family), dtype=torch.float64))
    line = torch.linspace(0, 1, 32, dtype=torch.float64) ** degree
    details = frame.apply(line.expand(1, 32, 32))[0, :16, 16:]
    inside = details[:, :11]
    assert inside.abs().max() < 1e-9
    if degree:
        rougher = frame.apply((torch.linspace(0, 1, 32).double() ** (degree + 1)).expand(1, 32, 32))[0, :16, 16:27]
        assert rougher.abs().max() > 1e-7


def test_shifts_are_cycle_spinning() -> None:
    """The coefficients of a shifted image are, up to their order, those of the image: no position is favoured."""
    x = torch.randn(1, 8, 8)
    frame = BlockDCT((8, 8), block=4, count=16)
    moved = x.roll((1, 3), (-2, -1))
    torch.testing.assert_close(frame.apply(x).abs().sum(), frame.apply(moved).abs().sum())
    single = BlockDCT((8, 8), block=4)
    assert not torch.allclose(single.apply(x).abs().sum(), single.apply(moved).abs().sum())


def test_blur_keeps_constants_inside_and_never_amplifies() -> None:
    blur = gaussian_blur((15, 15), 1.0)
    assert blur.apply(torch.ones(1, 15, 15))[0, 7, 7] == pytest.approx(1.0)
    assert 0.9 < float(blur.norm_sq()) <= 1.001


def test_transposed_and_composed_are_their_matrices() -> None:
    weight, x = torch.randn(3, 5), torch.randn(2, 3)
    flipped = Transposed(Dense(weight))
    torch.testing.assert_close(flipped.apply(x), x @ weight)
    assert torch.equal(flipped.matrix, weight.mT)
    assert (flipped.inputs, flipped.outputs) == (3, 5)
    torch.testing.assert_close(Transposed(flipped).apply(torch.ones(5)), Dense(weight).apply(torch.ones(5)))


@pytest.mark.parametrize(
    ("build", "error", "match"),
    [
        (lambda: BlockSensing(torch.randn(3, 10), (10, 10)), ShapeError, "square"),
        (lambda: BlockSensing(torch.randn(3, 9), (2, 9)), ShapeError, "smaller than a block"),
        (lambda: BlockSensing(torch.randn(3, 9), (4, 9)), ShapeError, "pad_to_blocks"),
        (lambda: orthonormal_gaussian(5, 4), OptionError, "rows"),
        (lambda: SubsampledFourier(torch.ones(3)), ShapeError, "mask"),
        (lambda: Inpainting(torch.ones(3)), ShapeError, "mask"),
        (lambda: cartesian_mask((8, 8), 0.0), OptionError, "ratio"),
        (lambda: radial_mask((8, 8), 1.5), OptionError, "ratio"),
        (lambda: gaussian_blur((8, 8), -1.0), OptionError, "sigma"),
        (lambda: BlockDCT((8, 8), block=4, count=3), OptionError, "square"),
        (lambda: BlockDCT((8, 8), block=0), OptionError, "block"),
        (lambda: Wavelet((8, 8), family="sym9"), OptionError, "family"),  # type: ignore[arg-type]
        (lambda: Wavelet((8, 8), levels=0), OptionError, "levels"),
        (lambda: Wavelet((8, 8), levels=3, family="db4"), ShapeError, "levels"),
        (lambda: Composed(Dense(torch.eye(2)), Dense(torch.eye(2))), OptionError, "maps"),
        (lambda: Composed(gaussian_blur((4, 4), 0.5), gaussian_blur((5, 5), 0.5)), ShapeError, "gives"),
    ],
)
def test_bad_measurements_are_refused(build: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        build()  # type: ignore[operator]
