"""Making a record of one or two recorded runs: settling sources, and marking what is opaque."""

import dataclasses
import difflib
import re

import torch
from torch import Tensor, nn

from .network import Network
from .record import Call, Value
from .recorder import DATA_READS, Recorder
from .running import Inputs

__all__ = ["RecordedRun", "assemble"]

_RANDOM = re.compile(
    r"rand|dropout|bernoulli|multinomial|(normal|uniform|exponential|random|geometric|cauchy)_$|^normal$"
)
_READS = {
    "input": "reads data that depends on the input into Python, which may decide what is called afterwards",
    "unseen": "reads data of unknown origin into Python, which may decide what is called afterwards",
    "random": "reads random numbers into Python, which may decide what is called afterwards",
    "parameter": "reads data of parameters or buffers into Python, which may decide what is called afterwards",
}


@dataclasses.dataclass
class RecordedRun:
    """One recorded run: modes of the modules by path, its arguments, inputs and outputs, and how it ended."""

    recorder: Recorder
    modes: dict[str, bool]
    grad: bool
    example: Inputs
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    error: str | None = None
    drew: tuple[str, ...] = ()


def _unknown(run: RecordedRun) -> dict[int, Value]:
    """The values of the tensors of a run that are neither registered nor computed in it, by the tensor's identity."""
    values = run.recorder.values
    return {id(t): values[v] for v, t in run.recorder.outside.items() if values[v].source == "unseen"}


def assemble(model: nn.Module, run: RecordedRun, other: RecordedRun | None, guessed: bool) -> tuple[Network, Network]:
    """The records of a run and of ``other``, a run in the other mode; None where the first did not end.

    A tensor of unknown origin that both runs meet existed before the second one, so it is a constant.
    """
    both = {} if other is None else _unknown(other)
    for identity, value in _unknown(run).items():
        if identity in both:
            value.source = both[identity].source = "constant"
    network = _network(model, run, guessed)
    if other is None:
        return network, network
    second = _network(model, other, guessed)
    if other.error is not None:
        missing: tuple[str, ...] = (f"in {'training' if other.modes[''] else 'evaluation'} {other.error}",)
    else:
        missing = _mark_by_mode(network, second)
    return dataclasses.replace(network, reasons=(*network.reasons, *missing)), second


def _network(model: nn.Module, run: RecordedRun, guessed: bool) -> Network:
    recorder = run.recorder
    _settle(recorder)
    return Network(
        model, tuple(recorder.calls), tuple(recorder.frames), tuple(recorder.values), run.inputs, run.outputs,
        run.modes[""], guessed, run.error is None, _reasons(run), run.modes, run.grad, run.example, _held(recorder),
    )  # fmt: skip


def _settle(recorder: Recorder) -> None:
    """Note from which sources every value was computed, and whether with random numbers; mark calls that are opaque."""
    for value in recorder.values:
        value.origins = frozenset((value.source,))
    for call in recorder.calls:
        come = frozenset(origin for value in call.reads for origin in value.origins)
        come |= {"random"} if _RANDOM.search(call.name) else set()
        for value in call.produces:
            value.origins = come
        call.opaque = call.opaque or _reason(call, come)


def _reason(call: Call, come: frozenset[str]) -> str | None:
    if any(value.source == "unseen" for value in call.inputs):
        return f"{call.name} takes a tensor that was computed where the recorder does not see it"
    if call.name == "data=":
        return "assigns .data, which neither autograd nor the recorder follows"
    if call.name in DATA_READS:
        come = frozenset("parameter" if origin == "buffer" else origin for origin in come)
        return next((f"{call.name} {words}" for origin, words in _READS.items() if origin in come), None)
    return None


def _reasons(run: RecordedRun) -> tuple[str, ...]:
    if run.error is not None:
        return (run.error,)
    found = [f"the forward draws from {name}, whose numbers are not recorded" for name in run.drew]
    if run.recorder.transformed:
        first = next(iter(run.recorder.transformed))
        found.append(f"{first} is called inside a transform of torch.func, whose calls are not recorded")
    if not run.outputs:
        found.append("the forward returns no tensor that the reader finds")
    if any(value.source == "unseen" for value in run.outputs):
        found.append("an output was computed where the recorder does not see it")
    return tuple(found)


def _held(recorder: Recorder) -> dict[int, Tensor]:
    """The tensors that are not parameters or buffers and that recomputing needs."""
    with torch._C.DisableTorchFunction():
        found = {i: t for i, t in recorder.outside.items() if recorder.values[i].source in ("constant", "unseen")}
        found.update(recorder.stray)
        return {index: tensor.detach() for index, tensor in found.items()}


def _mark_by_mode(network: Network, other: Network) -> tuple[str, ...]:
    """Mark the calls that the other mode does not make; the reason where it makes calls that this one does not."""
    here, there = "training" if network.training else "evaluation", "training" if other.training else "evaluation"
    ours, theirs = ([(call.path, call.name) for call in n.live] for n in (network, other))
    if ours == theirs:
        return ()
    blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    for call in (network.live[i] for tag, low, high, _, _ in blocks if tag != "equal" for i in range(low, high)):
        call.opaque = call.opaque or f"{call.name} is called in {here} only"
    missing = [theirs[i] for tag, _, _, low, high in blocks if tag != "equal" for i in range(low, high)]
    if not missing:
        return ()
    path, name = missing[0]
    return (f"{name} in {path or 'the network'} is called in {there} only, like {len(missing)} calls in all",)
