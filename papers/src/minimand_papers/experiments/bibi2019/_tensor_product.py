r"""The high-order tensor product of [Bibi2019], §3.3 and appendices D–F, in which a convolution is a matrix product.

This module writes the operators of the paper's Lemmas 1 and 2 as matrices, for readers of the paper. The library itself
computes with :mod:`minimand.norms.symbol`, which never forms them.

Tensors :math:`D \in \mathbb{R}^{n_1 \times n_2 \times n_3 \times n_4}` act on
:math:`X \in \mathbb{R}^{n_2 \times 1 \times n_3 \times n_4}`. Vectors are ordered with the feature fastest,
then the third, then the fourth dimension, as the Kronecker products of eq. (21) require.
"""

import torch
from torch import Tensor

from minimand.errors import ShapeError

__all__ = ["bdiag", "circ", "circular_lipschitz", "dft_basis", "fold", "matvec", "t_product", "transpose"]


def circ(tensor: Tensor) -> Tensor:
    r"""The circulant unfolding :math:`\mathrm{circ}_{HO}(D)`, of size :math:`n_1 n_3 n_4 \times n_2 n_3 n_4`.

    Its block at positions :math:`(p, q)` and :math:`(p', q')` is
    :math:`D(:, :, p - p' \bmod n_3, q - q' \bmod n_4)`.

    >>> circ(torch.tensor([1.0, 2.0, 3.0]).reshape(1, 1, 3, 1))
    tensor([[1., 3., 2.],
            [2., 1., 3.],
            [3., 2., 1.]])
    """
    _, _, n3, n4 = tensor.shape
    rows = (torch.arange(n3)[:, None] - torch.arange(n3)) % n3
    columns = (torch.arange(n4)[:, None] - torch.arange(n4)) % n4
    # (n1, n2, q, q', p, p') → rows (q, p, n1), columns (q', p', n2)
    blocks = tensor[:, :, rows[None, None], columns[:, :, None, None]]
    return blocks.permute(2, 4, 0, 3, 5, 1).reshape(n4 * n3 * tensor.shape[0], n4 * n3 * tensor.shape[1])


def matvec(tensor: Tensor) -> Tensor:
    r""":math:`\mathrm{MatVec}_{HO}(X)`: the vector of a tensor :math:`n_2 \times 1 \times n_3 \times n_4`."""
    if tensor.dim() != 4 or tensor.shape[1] != 1:
        raise ShapeError(f"MatVec takes a tensor of shape (n2, 1, n3, n4), got {tuple(tensor.shape)}")
    return tensor.squeeze(1).permute(2, 1, 0).reshape(-1)


def fold(vector: Tensor, size: tuple[int, int]) -> Tensor:
    r""":math:`\mathrm{fold}_{HO}`, the inverse of :func:`matvec` for maps of size :math:`n_3 \times n_4`.

    >>> X = torch.arange(12.0).reshape(2, 1, 3, 2)
    >>> torch.equal(fold(matvec(X), (3, 2)), X)
    True
    """
    n3, n4 = size
    return vector.reshape(n4, n3, -1).permute(2, 1, 0).unsqueeze(1)


def t_product(tensor: Tensor, x: Tensor) -> Tensor:
    r"""The product :math:`D \circledast X = \mathrm{fold}(\mathrm{circ}(D)\,\mathrm{MatVec}(X))` (eq. 19).

    Lemma 1: it is the circular convolution of ``x`` with the filters of ``tensor``, summed over the input
    features. With :math:`n_3 = n_4 = 1` it is a matrix-vector product, the fully-connected layer.

    >>> D = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).reshape(2, 2, 1, 1)
    >>> t_product(D, torch.ones(2, 1, 1, 1)).flatten()
    tensor([3., 7.])
    """
    return fold(circ(tensor) @ matvec(x), (tensor.shape[2], tensor.shape[3]))


def transpose(tensor: Tensor) -> Tensor:
    r"""Faces transposed, filters reversed: :math:`\mathrm{circ}(D^H) = \mathrm{circ}(D)^\top`.

    The reversal is about the origin of the circle (index 0 stays), where the paper says "rotated by 180°".
    """
    reverse = [(-torch.arange(n)) % n for n in tensor.shape[2:]]
    return tensor.transpose(0, 1)[:, :, reverse[0]][:, :, :, reverse[1]]


def bdiag(tensor: Tensor) -> Tensor:
    """The block-diagonal matrix of all frontal faces (eq. 20), in the order of :func:`matvec`."""
    return torch.block_diag(*tensor.permute(3, 2, 0, 1).flatten(0, 1))


def dft_basis(n3: int, n4: int, features: int) -> Tensor:
    r"""The unitary matrix :math:`F_{n_4} \otimes F_{n_3} \otimes I_n` of eq. (21), complex.

    .. math:: \mathrm{circ}(D) = (F_{n_4} \otimes F_{n_3} \otimes I_{n_1})\, \mathrm{bdiag}(\hat D)\,
              (F_{n_4} \otimes F_{n_3} \otimes I_{n_2})^H.

    Since the paper's :math:`\hat D` is the forward transform, the columns of :math:`F_n` must be the waves
    :math:`e^{+2\pi i jk/n}/\sqrt n`: the conjugate of the usual DFT matrix.

    >>> F = dft_basis(2, 3, 1)
    >>> torch.allclose(F @ F.mH, torch.eye(6, dtype=F.dtype))
    True
    """
    waves = [torch.fft.ifft(torch.eye(n, dtype=torch.complex128), norm="ortho") for n in (n4, n3)]
    return torch.kron(torch.kron(waves[0], waves[1]), torch.eye(features, dtype=torch.complex128))


def circular_lipschitz(tensor: Tensor) -> Tensor:
    r"""Lemma 2: :math:`L = \max_{ij} \lambda_{\max}(\hat A_{ij} \hat A_{ij}^H)` of a *circular* layer.

    For a layer with zero padding this is not an upper bound; use :func:`minimand.lipschitz`.

    >>> float(circular_lipschitz(torch.ones(1, 1, 2, 2)))  # the mean times four
    16.0
    """
    faces = torch.fft.fft2(tensor).permute(2, 3, 0, 1)
    return torch.linalg.matrix_norm(faces, 2).max() ** 2
