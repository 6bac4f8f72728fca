"""Law: threads that share a layer get the outputs of one thread, also while its weight is replaced."""

import copy
import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from minimand.nn import SolverConv2d, SolverLayer, SolverLinear
from minimand.solvers import FISTA, ProxGD, ProxSG
from tests.cases.operators import dense_matrix, norm_sq

THREADS = 8
LAYERS: dict[str, tuple[Callable[[], SolverLayer], tuple[int, ...]]] = {
    "dense": (lambda: SolverLinear(24, 16, solver=ProxGD(iters=4)), (5, 24)),
    "dense, sampled": (lambda: SolverLinear(24, 16, solver=ProxSG(iters=4), eval_mode="deterministic"), (5, 24)),
    "convolution": (lambda: SolverConv2d(3, 4, 3, padding=1, solver=FISTA(iters=3)), (2, 3, 6, 6)),
}


def _in_threads(work: Callable[[int], None]) -> None:
    """Run ``work`` in all threads at once and raise what one of them raised."""
    start, problems = threading.Barrier(THREADS), []

    def run(number: int) -> None:
        try:
            start.wait()
            work(number)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def _expected(layer: SolverLayer, weights: list[Tensor], y: Tensor) -> list[Tensor]:
    """The output for every weight, by a fresh copy of the layer in one thread."""
    answers = []
    for weight in weights:
        with torch.no_grad():
            layer.weight.copy_(weight)
        layer._track()
        answers.append(layer(y).detach())
    return answers


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_weight_changed_in_place_between_forwards(name: str) -> None:
    make, shape = LAYERS[name]
    layer, y = make().eval(), torch.randn(shape)
    weights = [scale * torch.randn_like(layer.weight) for scale in (1.0, 3.0, 0.1, 30.0, 1.0, 10.0)]
    expected = _expected(copy.deepcopy(layer), weights, y)
    for weight, answer in zip(weights, expected, strict=True):
        with torch.no_grad():
            layer.weight.copy_(weight)
        _in_threads(lambda _, answer=answer: [_assert_equal(layer(y), answer) for _ in range(4)])


@pytest.mark.parametrize("name", list(LAYERS))
def test_a_parameter_replaced_during_forwards(name: str) -> None:
    """Every output is the one of one of the weights, and no bound is below the norm of its weight."""
    make, shape = LAYERS[name]
    layer, y = make().eval(), torch.randn(shape)
    weights = [scale * torch.randn_like(layer.weight) for scale in (1.0, 3.0, 0.1, 30.0)]
    expected = _expected(copy.deepcopy(layer), weights, y)
    turns = itertools.count()

    def work(number: int) -> None:
        for _ in range(12):
            if number < 2:
                layer.weight = nn.Parameter(weights[next(turns) % len(weights)].clone())
            found = layer(y).detach()
            assert any(torch.allclose(found, answer, rtol=1e-4, atol=1e-5) for answer in expected)
            problem = layer.problem(y)
            assert problem.operator.norm_sq() >= norm_sq(dense_matrix(problem.operator)) * (1 - 1e-6)

    layer.weight = nn.Parameter(weights[0].clone())
    _in_threads(work)


@pytest.mark.parametrize("name", ["dense", "convolution"])
def test_training_never_steps_with_a_bound_below_the_truth(name: str) -> None:
    make, shape = LAYERS[name]
    layer, y = make().train(), torch.randn(shape)
    for scale in (1.0, 2.5, 0.2, 40.0):
        with torch.no_grad():
            layer.weight.mul_(scale)
        truth = norm_sq(dense_matrix(layer.operator(y)))

        def work(number: int, truth: Tensor = truth) -> None:
            for _ in range(4):
                layer(y).sum().backward()
                assert layer.problem(y).operator.norm_sq() >= truth * (1 - 1e-6)

        _in_threads(work)


def _assert_equal(found: Tensor, answer: Tensor) -> None:
    torch.testing.assert_close(found.detach(), answer, rtol=1e-4, atol=1e-5)
