"""PSNR and SSIM are scikit-image's; blocks go apart and together again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from minimand.errors import NonFiniteError, OptionError, ShapeError
from minimand.operators import from_blocks, pad_to_blocks, to_blocks
from minimand_papers.data import psnr, random_crops, ssim, unit_interval


@given(st.integers(7, 20), st.integers(7, 20), st.sampled_from([1.0, 255.0]), st.integers(0, 100))
def test_metrics_are_scikit_images(height: int, width: int, data_range: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    reference = torch.rand(height, width, generator=g, dtype=torch.float64) * data_range
    image = reference + 0.1 * data_range * torch.randn(height, width, generator=g, dtype=torch.float64)
    x, y = image.numpy(), reference.numpy()
    assert float(psnr(image, reference, data_range=data_range)) == pytest.approx(
        peak_signal_noise_ratio(y, x, data_range=data_range), rel=1e-9
    )
    assert float(ssim(image, reference, data_range=data_range)) == pytest.approx(
        structural_similarity(x, y, data_range=data_range), rel=1e-9
    )


@pytest.mark.parametrize("window", [3, 7, 11])
def test_windows_and_batches(window: int) -> None:
    image, reference = torch.rand(2, 3, 16, 18), torch.rand(2, 3, 16, 18)
    each = [
        structural_similarity(a.numpy(), b.numpy(), data_range=1.0, win_size=window)
        for a, b in zip(image.double().flatten(0, 1), reference.double().flatten(0, 1), strict=True)
    ]
    assert float(ssim(image, reference, window=window)) == pytest.approx(sum(each) / len(each), rel=1e-6)


def test_metrics_are_differentiable() -> None:
    image = torch.rand(1, 1, 9, 9, dtype=torch.float64, requires_grad=True)
    reference = torch.rand(1, 1, 9, 9, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ssim(x, reference), image)
    assert torch.autograd.gradcheck(lambda x: psnr(x, reference), image)


@given(st.integers(1, 5), st.integers(5, 17), st.integers(5, 17), st.integers(1, 3))
def test_blocks_assemble_to_the_image(block: int, height: int, width: int, batch: int) -> None:
    x = torch.rand(batch, 1, height, width)
    rows = to_blocks(pad_to_blocks(x, block), block)
    assert rows.shape[1] == block * block
    assert torch.equal(from_blocks(rows, (height, width)), x)


def test_crops_are_parts_of_the_images(generator: torch.Generator) -> None:
    image = torch.arange(30 * 40, dtype=torch.float32).reshape(1, 30, 40) / 1200
    crops = random_crops([image, torch.zeros(1, 5, 5)], 50, 8, generator=generator)
    assert crops.shape == (50, 1, 8, 8)
    values = set(image.flatten().tolist())
    poses = set()
    for crop in crops[:, 0]:
        assert set(crop.flatten().tolist()) <= values
        steps = (round(float((crop[1, 0] - crop[0, 0]) * 1200)), round(float((crop[0, 1] - crop[0, 0]) * 1200)))
        assert {abs(s) for s in steps} == {1, 40}
        poses.add(steps)
    assert len(poses) == 8


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: psnr(torch.rand(4, 4), torch.rand(4, 5)), ShapeError, "shape"),
        (lambda: psnr(torch.rand(4, 4), 255 * torch.rand(4, 4)), OptionError, "data_range"),
        (lambda: ssim(torch.rand(4, 4), torch.rand(4, 4)), ShapeError, "window"),
        (lambda: ssim(torch.rand(9, 9), torch.rand(9, 9), window=4), OptionError, "odd"),
        (lambda: ssim(torch.full((9, 9), torch.nan), torch.rand(9, 9)), NonFiniteError, "image"),
        (lambda: pad_to_blocks(torch.rand(1, 20, 40)), ShapeError, "smaller than a block"),
        (lambda: to_blocks(torch.rand(1, 40, 40)), ShapeError, "pad_to_blocks"),
        (lambda: from_blocks(torch.rand(5, 9), (6, 6)), ShapeError, "assemble"),
        (lambda: unit_interval(torch.full((2, 2), 200.0)), OptionError, r"\[0, 1\]"),
        (lambda: unit_interval(torch.full((2, 2), torch.nan)), NonFiniteError, "image"),
        (lambda: unit_interval(torch.ones(2, 2).long()), OptionError, "int64"),
        (lambda: random_crops([torch.rand(1, 5, 5)], 1, 8), ShapeError, "crop"),
        (lambda: random_crops([torch.rand(1, 5, 5), torch.rand(3, 5, 5)], 1, 4), ShapeError, "one kind"),
    ],
)
def test_bad_images_are_refused(call: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()  # type: ignore[operator]
