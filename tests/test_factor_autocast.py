"""Law: the factorisations compute in the precision of their data, also under autocast."""

import numpy as np
import pytest
import torch
from torch import nn

from minimand.factor import (
    NMF,
    CPTensor,
    DropoutFactorization,
    LowRank,
    LowRankCV,
    MatrixCompletion,
    ParallelNetwork,
    ParallelReLU,
    RobustPCA,
    SparseDictionary,
    certify,
    certify_tensor,
    dropout_optimum,
    equalize,
    factorize,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*stopped before its certificate")

_generator = torch.Generator().manual_seed(0)
U, V = torch.rand(14, 3, generator=_generator), torch.rand(9, 3, generator=_generator)
Y = U @ V.mT + 0.01 * torch.randn(14, 9, generator=_generator)

MODELS = {
    "lowrank": lambda: LowRank(0.1, random_state=0),
    "nmf": lambda: NMF(0.1, random_state=0),
    "nmf of a fixed size": lambda: NMF(0.1, n_components=2, random_state=0),
    "sparse": lambda: SparseDictionary(0.1, random_state=0),
    "robust": lambda: RobustPCA(1.0, random_state=0),
    "completion": lambda: MatrixCompletion(0.1, random_state=0),
    "dropout": lambda: DropoutFactorization(3, p=0.5, random_state=0),
    "choice": lambda: LowRankCV(cv=2, n_lams=3, random_state=0),
    "tensor": lambda: CPTensor(0.1, random_state=0),
}
AUTOCAST = torch.bfloat16


def of(name):
    return {"dropout": Y.numpy(), "tensor": Y.reshape(14, 3, 3)}.get(name, Y)


def numbers(found):
    return np.asarray(found if isinstance(found, np.ndarray | torch.Tensor) else [found], dtype=np.float64)


def results(name):
    """The numbers of a fit, of codes and of scores."""
    model, data = MODELS[name](), of(name)
    codes = model.fit_transform(data)
    found = [codes, model.components_, model.objective_, model.transform(data), model.inverse_transform(codes)]
    found += [model.score(data)]
    if name != "dropout":
        found += [model.certificate_.gap]
    if hasattr(model, "certify"):
        found += [model.certify(data).gap, model.lambda_max(data)]
    if hasattr(model, "partial_fit"):
        batches = MODELS[name]().partial_fit(data[:8]).partial_fit(data[8:])
        found += [batches.components_]
    return [numbers(each) for each in found]


@pytest.mark.parametrize("name", MODELS)
def test_estimators(name):
    plain = results(name)
    with torch.autocast("cpu", AUTOCAST):
        cast = results(name)
    for a, b in zip(plain, cast, strict=True):
        np.testing.assert_array_equal(a, b)


FUNCTIONS = {
    "factorize": lambda: factorize(Y, lam=0.1, random_state=0).objective,
    "certify": lambda: certify(Y, U, V, lam=0.1).gap,
    "certify_tensor": lambda: certify_tensor(Y.reshape(14, 3, 3), (U, V[:3], V[3:6]), lam=0.1).gap,
    "dropout_optimum": lambda: dropout_optimum(Y, 3, 0.5)[0],
    "equalize": lambda: equalize(U, V)[0],
    "ParallelReLU": lambda: ParallelReLU(0.1, random_state=0).fit(U, U[:, 0]).objective_,
}


def network():
    torch.manual_seed(0)
    layers = lambda: nn.Sequential(nn.Linear(3, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))  # noqa: E731
    return ParallelNetwork(layers, 0.01, max_networks=2, restarts=2, descent=30).fit(U, U[:, :1]).history_[-1]


@pytest.mark.parametrize("name", [*FUNCTIONS, "ParallelNetwork"])
@pytest.mark.filterwarnings("ignore:ParallelNetwork stopped")
def test_functions_and_networks(name):
    function = FUNCTIONS.get(name, network)
    plain = numbers(function())
    with torch.autocast("cpu", AUTOCAST):
        np.testing.assert_array_equal(plain, numbers(function()))
