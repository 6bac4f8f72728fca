"""Lemmas 1 and 2 of Bibi et al. 2019: a convolution is a tensor product, diagonal in the 2-D DFT."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minimand.errors import ShapeError
from minimand.operators import Conv2d, Dense, lipschitz
from minimand_papers.experiments.bibi2019._tensor_product import (
    bdiag,
    circ,
    circular_lipschitz,
    dft_basis,
    fold,
    matvec,
    t_product,
    transpose,
)

SIZES = [(2, 3, 4, 5), (3, 2, 3, 3), (1, 1, 5, 2), (4, 2, 1, 1), (2, 2, 1, 6)]
every_size = pytest.mark.parametrize("size", SIZES, ids=str)


def _tensor(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def _circular_convolution(tensor: Tensor, x: Tensor) -> Tensor:
    """By torch: correlation with the reversed filters on the periodically extended map."""
    n3, n4 = tensor.shape[2:]
    extended = F.pad(x.transpose(0, 1), (n4 - 1, 0, n3 - 1, 0), mode="circular") if n3 * n4 > 1 else x.transpose(0, 1)
    return F.conv2d(extended, tensor.flip(2, 3)).transpose(0, 1)


@every_size
def test_lemma_1_the_product_is_a_circular_convolution(size: tuple[int, ...]) -> None:
    tensor, x = _tensor(*size), _tensor(size[1], 1, *size[2:])
    torch.testing.assert_close(t_product(tensor, x), _circular_convolution(tensor, x))


@every_size
def test_lemma_1_features_are_summed(size: tuple[int, ...]) -> None:
    tensor, x = _tensor(*size), _tensor(size[1], 1, *size[2:])
    parts = [t_product(tensor[:, i : i + 1], x[i : i + 1]) for i in range(size[1])]
    torch.testing.assert_close(t_product(tensor, x), sum(parts))


@every_size
def test_the_dft_block_diagonalises(size: tuple[int, ...]) -> None:
    n1, n2, n3, n4 = size
    tensor = _tensor(*size)
    left, right = dft_basis(n3, n4, n1), dft_basis(n3, n4, n2)
    product = left @ bdiag(torch.fft.fft2(tensor)) @ right.mH
    torch.testing.assert_close(product, circ(tensor).to(product.dtype))


@every_size
def test_the_transpose_is_the_adjoint(size: tuple[int, ...]) -> None:
    tensor = _tensor(*size)
    torch.testing.assert_close(circ(transpose(tensor)), circ(tensor).T)


@every_size
def test_fold_inverts_matvec(size: tuple[int, ...]) -> None:
    x = _tensor(size[1], 1, *size[2:])
    assert torch.equal(fold(matvec(x), size[2:]), x)


@every_size
def test_lemma_2_is_the_norm_of_the_circulant(size: tuple[int, ...]) -> None:
    tensor = _tensor(*size)
    torch.testing.assert_close(circular_lipschitz(tensor), torch.linalg.matrix_norm(circ(tensor), 2) ** 2)


def test_lemma_2_is_what_the_library_computes_on_the_same_circle() -> None:
    kernel = _tensor(3, 2, 3, 3)
    bound = lipschitz(Conv2d(kernel, (6, 5), padding=1, padding_mode="circular"), method="exact")
    truth = circular_lipschitz(F.pad(kernel, (0, 2, 0, 3)))
    torch.testing.assert_close(bound, truth, rtol=1e-10, atol=0)


def test_a_fully_connected_layer_is_the_case_of_one_pixel() -> None:
    weight, y = _tensor(4, 3), _tensor(3)
    torch.testing.assert_close(t_product(weight[:, :, None, None], y[:, None, None, None]).flatten(), weight @ y)
    torch.testing.assert_close(circ(weight[:, :, None, None]), weight)
    torch.testing.assert_close(
        circular_lipschitz(weight[:, :, None, None]),
        lipschitz(Dense(weight), method="exact"),
        rtol=1e-10,
        atol=0,
    )


def test_matvec_names_the_shape_it_needs() -> None:
    with pytest.raises(ShapeError, match="n2, 1, n3, n4"):
        matvec(_tensor(2, 3, 4, 4))
