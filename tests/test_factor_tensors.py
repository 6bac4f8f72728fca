"""Law: CP decompositions of any order reach the closed form, and their bounds hold."""

import numpy as np
import pytest
import torch

from minimand.errors import ShapeError
from minimand.factor import CPTensor, Status, certify_tensor, cp
from minimand.factor.cp import ascend, unfolding_bound


@pytest.mark.parametrize("shape", [(3, 1, 2, 1), (6, 5, 4, 3), (3, 4, 2, 3, 3), (2, 3, 2, 3, 2, 3), (2,) * 7], ids=str)
def test_cp_of_any_order_has_the_closed_form_on_orthogonal_components(shape):
    generator = torch.Generator().manual_seed(0)
    r = min(2, min(shape))
    parts = [torch.linalg.qr(torch.randn(n, r, generator=generator, dtype=torch.float64)).Q for n in shape]
    letters = "abcdefg"[: len(shape)]
    rule = f"r,{','.join(f'{i}r' for i in letters)}->{letters}"
    sizes = torch.tensor([5.0, 3.0], dtype=torch.float64)[:r]
    Y = torch.einsum(rule, sizes, *parts)
    model = CPTensor(1.0, random_state=0)
    U = model.fit_transform(Y)
    assert model.objective_ == pytest.approx(float((sizes - 0.5).sum()), rel=1e-6)
    assert model.certificate_.status is certify_tensor(Y, model.factors_, lam=1.0).status is Status.CERTIFIED
    shrunk = torch.einsum(rule, sizes - 1, *parts)
    torch.testing.assert_close(model.inverse_transform(U), shrunk, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.einsum(rule, torch.ones_like(sizes), *model.factors_), shrunk, atol=1e-4, rtol=0)
    torch.testing.assert_close(model.transform(Y), U, atol=1e-6, rtol=0)
    assert [x.objective_ for x in model.path(Y, [2.0, 1.0])][1] == pytest.approx(model.objective_, rel=1e-6)
    for c in (1e-150, 1e150):
        other = CPTensor(c, random_state=0).fit(c * Y, start=[c ** (1 / len(shape)) * x for x in model.factors_])
        assert other.certificate_.status is Status.CERTIFIED
        moved = torch.einsum(rule, torch.full_like(sizes, 1 / c), *other.factors_)
        torch.testing.assert_close(moved, shrunk, atol=1e-4, rtol=0)


def test_unfoldings_bound_the_polar_of_any_order():
    rng = np.random.default_rng(0)
    for shape in ((3, 3, 3, 3), (2, 3, 4, 2), (2, 2, 2, 2, 2)):
        Z = torch.from_numpy(rng.normal(size=shape))
        best = float(ascend(Z, torch.Generator().manual_seed(0))[0][0])
        bound = unfolding_bound(Z, best).value
        assert best <= bound
        pairs = [Z.movedim((i, j), (0, 1)).flatten(2).flatten(0, 1) for i in range(len(shape)) for j in range(i)]
        singles = [Z.movedim(i, 0).flatten(1) for i in range(len(shape))]
        norms = [float(torch.linalg.matrix_norm(x, 2)) for x in pairs + singles]
        assert bound == pytest.approx(min(norms), rel=1e-3)


def test_an_interrupted_cp_fit_leaves_the_factors_of_its_last_sweep(monkeypatch):
    Y, calls, update = np.random.default_rng(0).normal(size=(5, 4, 3, 3)), [], cp._updated

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return update(*args)

    monkeypatch.setattr(cp, "_updated", interrupted)
    model = CPTensor("20%", random_state=0)
    with pytest.raises(KeyboardInterrupt, match="interrupted_"):
        model.fit(Y)
    assert model.interrupted_
    assert model.certificate_.status is Status.UNDECIDED
    assert 0 < model.objective_ < 0.5 * np.square(Y).sum()
    assert model.inverse_transform(model.factors_[0]).shape == Y.shape


@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e100])
def test_the_certificate_of_fitted_components(scale):
    """``certify`` is the certificate of the components with the best codes, which are nearly those of the fit."""
    Y = scale * np.einsum("ir,jr,kr->ijk", *(np.random.default_rng(k).random((n, 2)) for k, n in enumerate((7, 5, 4))))
    model = CPTensor("5%", tol=1.0, random_state=0).fit(Y)
    found, tensor = model.certify(Y), model.certify(torch.from_numpy(Y))
    factors = (model.transform(Y), *model.factors_[1:])
    assert found == tensor == certify_tensor(Y, factors, lam=model.lam_, tol=1.0)
    assert found.relative_gap == pytest.approx(model.certificate_.relative_gap, abs=0.01)
    with pytest.raises(ShapeError, match="slices have shape"):
        model.certify(Y[:, :3])
