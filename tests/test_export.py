"""Laws: exported programs and ONNX files compute what the layers compute, for every batch and map size; what cannot be
exported is refused in one sentence."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from minimand.adjoints import Implicit
from minimand.errors import CapabilityError, ConversionError
from minimand.functions import curves
from minimand.nn import SolverConv1d, SolverConv2d, SolverLinear, convert, plan
from minimand.operators import Dense
from minimand.solvers import ADMM, FISTA, ProxGD, ProxSG, Solver

from .cases import solvers

# torch's exporter uses its own deprecated names, and warns about ranges that it rounds.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
]
# One of each kind: samplings and sizes of samples differ in the step only, which is a constant of the file.
CASES = [*solvers.DETERMINISTIC, *solvers.VARIANCE_REDUCED[1:3], *solvers.NOISY[::3]]
SOLVERS = [ADMM(iters=2, cg_iters=1) if isinstance(c.solver, ADMM) else c.of(2) for c in CASES]
BATCH, ROWS = (Dim(name, min=2, max=1024) for name in ("batch", "rows"))
SIZES = {2: Dim("height", min=6, max=512), 3: Dim("width", min=6, max=512)}


class _Layers(nn.Module):
    """A dense layer and a convolution whose stride leaves a remainder."""

    def __init__(self, solver: Solver) -> None:
        super().__init__()
        options: dict[str, Any] = {"solver": solver, "eval_mode": "deterministic"}
        self.dense, self.conv = SolverLinear(8, 5, **options), SolverConv2d(4, 6, 3, 2, 1, groups=2, **options)
        self.sizes = {0: ROWS}, {0: BATCH, **SIZES}

    def forward(self, rows: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
        return self.dense(rows), self.conv(maps)

    @staticmethod
    def inputs(batch: int, size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 8), torch.randn(batch, 4, size, size + 1)


def _runtime(model: nn.Module, inputs: tuple[Tensor, ...], sizes: Any, folder: Path) -> Any:
    """The model as onnxruntime computes it from a file."""
    torch.onnx.export(model, inputs, folder / "model.onnx", dynamo=True, dynamic_shapes=sizes, verbose=False)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    names = [each.name for each in session.get_inputs()]

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        outputs = session.run(None, {name: np.asarray(each) for name, each in zip(names, given, strict=True)})
        return tuple(map(torch.from_numpy, outputs))

    return run


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_every_solver_exports_with_any_batch_and_map_size(solver: Solver, tmp_path: Path) -> None:
    """Before the first forward pass; to torch's programs and to ONNX."""
    model = _Layers(solver).eval()
    if isinstance(solver, ADMM):
        model.dense = SolverLinear(8, 12, solver=solver)  # the system of the inputs
    given = model.inputs(3, 8)
    program = torch.export.export(model, given, dynamic_shapes=model.sizes).module()
    runtime = _runtime(model, given, model.sizes, tmp_path)
    with torch.no_grad():
        for batch, size in ((3, 8), (7, 11), (2, 20)):
            inputs = model.inputs(batch, size)
            torch.testing.assert_close(program(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(runtime(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


class _Curves(nn.Module):
    """The activations whose nodes onnxruntime has in single precision only; their roots are found in double."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.stack([curves.softplus(z, 2.0, 20.0), curves.elu(z, 0.5), curves.hardsigmoid(z)])


@pytest.mark.parametrize("strict", [None, False, True])
def test_activations_in_double_precision_export_to_onnx(tmp_path: Path, strict: bool | None) -> None:
    z, model = torch.linspace(-30, 30, 61, dtype=torch.float64), _Curves().eval()
    given: Any = model if strict is None else torch.export.export(model, (z,), strict=strict)
    (found,) = _runtime(given, (z,), None, tmp_path)(z)
    expected = F.softplus(z, 2.0), F.elu(z, 0.5), F.hardsigmoid(z)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_activations_have_the_derivatives_of_torch(strict: bool) -> None:
    """At zero, too, where the pre-activation of zero padding or of a zero bias is."""
    z, found = torch.tensor([-torch.inf, -2.0, 0.0, 2.0, 40.0], dtype=torch.float64), []
    for model in (_Curves(), torch.export.export(_Curves(), (z,), strict=strict).module()):
        leaf = z.clone().requires_grad_()
        out = model(leaf)
        found.append((out, *(torch.autograd.grad(row.sum(), leaf, retain_graph=True)[0] for row in out)))
    torch.testing.assert_close(*found)


def _network() -> nn.Module:
    parts = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    network = nn.Sequential(*parts, nn.Flatten(), nn.Dropout(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    nn.init.uniform_(network[1].running_var, 0.5, 2)
    return convert(network, {"0": FISTA(2), "6": ProxSG(2)}).eval()


def test_a_converted_network_exports(tmp_path: Path) -> None:
    model, y = _network(), torch.randn(3, 3, 8, 9)
    for layer in (model[0], model[6]):
        layer.eval_mode = "deterministic"
    sizes = ({0: BATCH, **SIZES},)
    program = torch.export.export(model, (y,), dynamic_shapes=sizes).module()
    runtime = _runtime(model, (y,), sizes, tmp_path)
    other = torch.randn(5, 3, 12, 7)
    torch.testing.assert_close(program(other), model(other), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(runtime(other)[0], model(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solver", [ProxGD(2), ADMM(2, cg_iters=1)], ids=str)
def test_a_dynamic_graph_compiles_whole(solver: Solver) -> None:
    torch._dynamo.reset()
    model = _Layers(solver).eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad():
        for batch, size in ((3, 8), (6, 11)):
            inputs = model.inputs(batch, size)
            torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


def test_an_implicit_layer_compiles_whole_where_nothing_is_differentiated() -> None:
    torch._dynamo.reset()
    layer, y = SolverLinear(8, 4, solver=FISTA(20), adjoint=Implicit()).eval(), torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(y), layer(y))


@pytest.mark.parametrize("options", [{"padding": "same", "dilation": 2}, {"stride": 3}, {"stride": 2, "padding": 3}])
def test_a_graph_has_the_adjoint_of_every_geometry(options: dict[str, Any]) -> None:
    layer = SolverConv1d(2, 3, 4, solver=ProxGD(3), **options).eval()
    program = torch.export.export(layer, (torch.randn(2, 2, 11),), dynamic_shapes=({2: Dim("n", min=8, max=99)},))
    for size in (8, 9, 10, 13, 14):
        y = torch.randn(2, 2, size)
        torch.testing.assert_close(program.module()(y), layer(y), rtol=1e-5, atol=1e-5)


def test_the_gram_matrix_of_a_file_does_not_depend_on_the_batch() -> None:
    """A program for any batch does without, and one for a large batch has it, as in eager mode."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(40, 60))

        def forward(self, y: Tensor) -> Tensor:
            gram = Dense(self.weight).gram_if_cheaper(y.shape[0], 9)
            return y.sum(-1, keepdim=True) + (0 if gram is None else gram.sum())

    for sizes, formed in ((None, True), (({0: BATCH},), False)):
        program = torch.export.export(Rows(), (torch.randn(64, 60),), dynamic_shapes=sizes)
        assert ("matmul" in str(program.graph) or "aten.mm" in str(program.graph)) == formed


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
@pytest.mark.parametrize("training", [True, False])
def test_an_export_of_samples_is_refused(training: bool) -> None:
    model, y = _network().train(training), torch.randn(3, 3, 8, 9)
    model[6].eval_mode = "stochastic"
    with pytest.raises(
        CapabilityError, match=r"^6: ProxSG draws samples .*eval_mode='deterministic' before the export$"
    ):
        torch.export.export(model, (y,))


def test_a_trace_is_refused_and_that_of_the_exported_program_works() -> None:
    model, y = SolverConv2d(3, 4, 3, stride=2, solver=FISTA(2)).eval(), torch.randn(2, 3, 8, 8)
    with pytest.raises(CapabilityError, match=r"^SolverConv2d: torch.jit.trace records sizes .*\(x,\)\)$"):
        torch.jit.trace(model, (y,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(torch.export.export(model, (y,)).module(), (y,))
    torch.testing.assert_close(traced(y), model(y), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(SolverLinear(3, 4), nn.Linear(4, 2)))
    with pytest.raises(CapabilityError, match=r"torch.jit.script cannot compile SolverLinear, .*torch.export"):
        torch.jit.script(model)
    torch.jit.script(model[0][1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_layers_are_named() -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    quantised = quantization.quantize_dynamic(network, {nn.Linear})
    with pytest.raises(ConversionError, match=r"matches '0', .*quantized.*convert the model before it is quantised"):
        convert(quantised, {"0": ProxGD(2)})
    half = quantization.quantize_dynamic(network, {"2": quantization.default_dynamic_qconfig})
    assert "is quantised" in plan(half, ProxGD(2)).left["2"]
    # The remedy: a solver layer keeps its weight.
    converted = quantization.quantize_dynamic(convert(network, {"0": ProxGD(2)}).eval(), {nn.Linear})
    assert isinstance(converted[0], SolverLinear)
    assert not isinstance(converted[2], nn.Linear)
    assert converted(torch.randn(3, 4)).shape == (3, 2)
