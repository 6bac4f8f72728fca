"""Laws: threads that share a layer get what one thread gets, also while its weight changes or others compile."""

import copy
import dataclasses
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from minimand.adjoints import Checkpoint
from minimand.nn import RidgeNet, SolverConv1d, SolverConv2d, SolverLayer, SolverLinear
from minimand.norms import tracker as tracking
from minimand.operators import Conv2d, Dense, LipschitzTracker, orthonormal_gaussian
from minimand.solvers import FISTA, SVRG, ProxGD, ProxSG, Sample
from minimand.solvers.sampling import Nice, Request
from minimand.train import ProxProp
from minimand.train.proxprop.layers import WeightUnit
from tests.cases.operators import dense_matrix, norm_sq

THREADS = 8
SCALES = (1.0, 3.0, 0.1, 30.0, 1.0, 10.0)
# A sample of all features goes through the sampling, and yet has one answer.
LAYERS: dict[str, tuple[Callable[[], SolverLayer], tuple[int, ...]]] = {
    "dense": (lambda: SolverLinear(24, 16, solver=ProxGD(iters=4)), (5, 24)),
    "dense, sampled": (lambda: SolverLinear(24, 16, solver=ProxSG(iters=4, tau=1.0)), (5, 24)),
    "dense, one sample": (lambda: SolverLinear(24, 16, solver=ProxSG(4, tau=1.0), shared_sample=True), (5, 24)),
    "conv1d": (lambda: SolverConv1d(3, 4, 3, padding=1, solver=FISTA(iters=3)), (2, 3, 9)),
    "conv2d": (lambda: SolverConv2d(8, 6, 3, padding=1, solver=ProxGD(iters=2)), (2, 8, 5, 5)),
    "conv2d, sampled": (lambda: SolverConv2d(4, 4, 3, groups=2, solver=SVRG(inner=3, tau=1.0)), (2, 4, 5, 5)),
}
every_layer = pytest.mark.parametrize("name", list(LAYERS))
both_modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def _in_threads(work: Callable[[int], object], threads: int = THREADS) -> None:
    """Run ``work`` in all threads at once and raise what one of them raised."""
    start, problems = threading.Barrier(threads), []

    def run(number: int) -> None:
        try:
            start.wait()
            work(number)
        except BaseException as error:
            problems.append(error)

    everyone = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in everyone:
        thread.start()
    for thread in everyone:
        thread.join()
    if problems:
        raise problems[0]


def _made(name: str, training: bool) -> tuple[SolverLayer, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make().train(training)
    # In training the bound depends on the weights before, unless no drift is tolerated.
    inputs, outputs, _ = layer._tracker.parts
    layer._tracker = LipschitzTracker(layer.operator(), tolerance=0.0, inputs=inputs, outputs=outputs).train(training)
    return layer, torch.randn(shape), [scale * torch.randn_like(layer.weight) for scale in SCALES]


def _passes(layer: SolverLayer, y: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and in training the gradient of the input."""
    y = y.clone().requires_grad_(layer.training)
    out = layer(y)
    return out.detach(), torch.autograd.grad(out.square().sum(), y)[0] if layer.training else y


def _expected(layer: SolverLayer, weights: list[Tensor], y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The passes for every weight, by fresh copies of the layer in one thread."""
    answers = []
    for weight in weights:
        fresh = copy.deepcopy(layer)
        fresh.weight = nn.Parameter(weight.clone())
        answers.append(_passes(fresh, y))
    return answers


def _equal(found: tuple[Tensor, Tensor], answer: tuple[Tensor, Tensor]) -> bool:
    pairs = zip(found, answer, strict=True)
    return all(bool((a - b).abs().max() <= 1e-4 * b.abs().max() + 1e-6) for a, b in pairs)


@every_layer
@both_modes
def test_a_weight_changed_in_place_between_forwards(name: str, training: bool) -> None:
    layer, y, weights = _made(name, training)
    for weight, answer in zip(weights, _expected(layer, weights, y), strict=True):
        with torch.no_grad():
            layer.weight.copy_(weight)
        found: list[tuple[Tensor, Tensor]] = []
        _in_threads(lambda _, found=found: found.extend(_passes(layer, y) for _ in range(2)))
        assert len(found) == 2 * THREADS
        assert all(_equal(each, answer) for each in found)


@every_layer
@both_modes
def test_a_parameter_replaced_during_forwards(name: str, training: bool) -> None:
    """Every output is the one of one of the weights, and no bound is below the norm of its weight."""
    layer, y, weights = _made(name, training)
    answers, turns = _expected(layer, weights, y), itertools.count()
    truths = [norm_sq(dense_matrix(layer.operator(y).with_weight(weight))) for weight in weights]

    def work(number: int) -> None:
        for _ in range(8):
            if number < 2:
                layer.weight = nn.Parameter(weights[next(turns) % len(weights)].clone())
            found = _passes(layer, y)
            assert any(_equal(found, answer) for answer in answers)
            operator = layer.problem(y).operator
            (truth,) = (t for t, w in zip(truths, weights, strict=True) if torch.equal(w, operator.weight))
            assert operator.norm_sq() >= truth * (1 - 1e-6)

    layer.weight = nn.Parameter(weights[0].clone())
    _in_threads(work)


@every_layer
def test_training_never_steps_with_a_bound_below_the_truth(name: str) -> None:
    """With the usual tolerance, in which threads meet references of nearby weights."""
    make, shape = LAYERS[name]
    layer, y = make().train(), torch.randn(shape)
    for scale in (1.0, 1.1, 2.5, 0.2, 40.0):
        with torch.no_grad():
            layer.weight.mul_(scale)
        truth = norm_sq(dense_matrix(layer.operator(y)))

        def work(number: int, truth: Tensor = truth) -> None:
            layer(y).sum().backward()
            assert layer.problem(y).operator.norm_sq() >= truth * (1 - 1e-6)

        _in_threads(work)


def test_threads_share_the_transformed_kernels_of_an_operator() -> None:
    operator, x = Conv2d(torch.randn(64, 64, 3, 3), (16, 16), padding=1), torch.randn(THREADS, 2, 64, 16, 16)
    prepared, found = operator.repeated(2), [torch.empty(0)] * THREADS
    assert prepared._kernels is not None
    _in_threads(lambda k: found.__setitem__(k, prepared.normal(x[k])))
    for k in range(THREADS):
        torch.testing.assert_close(found[k], operator.normal(x[k]), rtol=1e-3, atol=1e-2)


def test_forwards_beside_an_export() -> None:
    """Whether torch compiles is one flag for all threads; the other threads do not take the paths of traced tensors."""
    layer, y, weights = _made("dense", False)
    answers, other, stop = _expected(layer, weights, y), SolverLinear(4, 3).eval(), threading.Event()

    def work(number: int) -> None:
        while number and not stop.is_set():
            torch.export.export(other, (torch.randn(2, 4),))
        try:
            for weight, answer in [*zip(weights, answers, strict=True)] * (0 if number else 60):
                with torch.no_grad():
                    layer.weight.copy_(weight)
                assert _equal(_passes(layer, y), answer)
        finally:
            stop.set()

    _in_threads(work, 2)


def test_compiled_layers_in_threads() -> None:
    torch._dynamo.reset()
    layer, y, weights = _made("dense, sampled", False)
    calls = [torch.compile(layer, backend="eager", fullgraph=True), layer]
    for weight, answer in zip(weights, _expected(layer, weights, y), strict=True):
        with torch.no_grad():
            layer.weight.copy_(weight)
        found: list[Tensor] = []
        _in_threads(lambda number, found=found: found.extend(calls[number % 2](y).detach() for _ in range(2)))
        assert all(_equal((each, y), answer) for each in found)


def _replica(module: nn.Module, scale: float) -> nn.Module:
    """What ``nn.DataParallel`` makes of a module for each device: Parameters become attributes."""
    made = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        made._modules[name] = _replica(child, scale)
    for name, parameter in module._parameters.items():
        setattr(made, name, scale * parameter.detach())
    for name, buffer in module._buffers.items():
        setattr(made, name, buffer.clone())
    return made


@every_layer
def test_replicas_of_data_parallelism(name: str) -> None:
    layer, y, _ = _made(name, False)
    replicas, found = [_replica(layer, 1.0 + k) for k in range(THREADS)], [torch.empty(0)] * THREADS
    _in_threads(lambda k: found.__setitem__(k, replicas[k](y)))
    for k in range(THREADS):
        alone = copy.deepcopy(layer)
        alone.load_state_dict({key: (1.0 + k) * value for key, value in layer.state_dict().items()})
        torch.testing.assert_close(found[k], alone(y), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_published_reference_is_never_written_to(compiled: bool) -> None:
    """Another thread may be reading it."""
    torch._dynamo.reset()
    layer, y = SolverLinear(6, 4), torch.randn(3, 6)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    call(y)
    published, content = layer._tracker.reference, layer._tracker.reference.clone()
    with torch.no_grad():
        layer.weight.mul_(5)
    call(y)
    assert torch.equal(published, content)
    assert layer._tracker.reference is not published


def test_a_weight_that_changes_while_it_is_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when other threads train it: the bound that is kept belongs to the weight that is kept."""
    weight, certify = torch.randn(6, 6), tracking.top_singular

    def interrupted(*args: object, **options: object) -> object:
        found = certify(*args, **options)
        weight.mul_(2)
        return found

    tracker = LipschitzTracker(Dense(weight))
    monkeypatch.setattr(tracking, "top_singular", interrupted)
    tracker.bound()
    monkeypatch.undo()
    assert tracker.bound() >= norm_sq(weight.double())


def test_a_manual_tracker_that_another_thread_refreshes() -> None:
    """The other thread has counted its refresh, but this one has read the reference before."""
    weight = torch.randn(4, 4)
    tracker = LipschitzTracker(Dense(weight), refresh="manual")
    tracker.refreshes = 1
    assert tracker.bound() >= norm_sq(weight.double())


@dataclasses.dataclass(frozen=True)
class _Interrupted(Nice):
    """A sampling that records its draws, and another thread that draws from the same generator in between."""

    seen: list[Tensor] = dataclasses.field(default_factory=list)
    other: list[torch.Generator | None] = dataclasses.field(default_factory=list)

    def draw(self, request: Request) -> Sample:
        sample = super().draw(request)
        self.seen.append(sample.weight)
        for generator in self.other:
            torch.rand(3, generator=generator)
        return sample


@pytest.mark.parametrize("own", [False, True], ids=["global", "own"])
def test_checkpoints_replay_their_samples_whatever_others_draw(own: bool) -> None:
    sampling = _Interrupted()
    layer = SolverLinear(12, 8, solver=ProxSG(iters=4, sampling=sampling), adjoint=Checkpoint(every=2))
    layer.generator = torch.Generator().manual_seed(0) if own else None
    sampling.other.append(layer.generator)
    out = layer(torch.randn(3, 12))
    drawn = list(sampling.seen)
    sampling.seen.clear()
    state = layer.generator.get_state() if own else torch.get_rng_state()
    sampling.other.clear()
    out.sum().backward()
    # The last segment is replayed first.
    assert all(torch.equal(a, b) for a, b in zip(sampling.seen, [*drawn[2:], *drawn[:2]], strict=True))
    assert torch.equal(state, layer.generator.get_state() if own else torch.get_rng_state())


def test_proxprop_counts_the_rows_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    inputs, alone = torch.randn(THREADS, 6, 12, dtype=torch.float64), copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        ProxProp(each).attach(optimizer)
    for x in inputs:
        alone(x).square().sum().backward()
    new_rows = WeightUnit.new_rows

    def slow(hooks: WeightUnit) -> object:
        rows = new_rows(hooks)
        time.sleep(2e-3)  # other threads run meanwhile
        return rows

    monkeypatch.setattr(WeightUnit, "new_rows", slow)
    _in_threads(lambda k: model(inputs[k]).square().sum().backward())
    monkeypatch.undo()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=1e-8, atol=1e-10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_worker_forked_while_another_thread_reads_a_network() -> None:
    source = """
import os, signal, threading, torch
from minimand.network import read
from minimand.network.state import preserved

held, done = threading.Event(), threading.Event()
def hold():
    with preserved(torch.nn.Linear(2, 2)):
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
if not (child := os.fork()):
    signal.alarm(20)
    read(torch.nn.Linear(2, 2), torch.randn(1, 2))
    os._exit(0)
done.set()
raise SystemExit(os.waitpid(child, 0)[1])
"""
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", source], env=environment).returncode == 0


def test_reconstructions_while_the_filters_are_replaced() -> None:
    """Every result is that of one of the filters, with the bound of these."""
    torch.manual_seed(0)
    net, y = RidgeNet(orthonormal_gaussian(6, 25), 2, 8, 3, noise=0.1).eval(), torch.rand(2, 6)
    banks = [net.filters.detach(), *(torch.randn_like(net.filters) for _ in range(2))]
    answers, turns = [], itertools.count()
    for bank in banks:
        fresh = copy.deepcopy(net)
        fresh.filters = nn.Parameter(bank.clone())
        answers.append(fresh.solve(y))

    def work(number: int) -> None:
        for _ in range(5):
            if number < 2:
                net.filters = nn.Parameter(banks[next(turns) % len(banks)].clone())
            found = net.solve(y)
            (answer,) = (a for a in answers if (a.x - found.x).abs().max() <= 1e-3 * a.x.abs().max())
            assert float(found.optimality) == pytest.approx(float(answer.optimality), rel=0.1)

    _in_threads(work)
