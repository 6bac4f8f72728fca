"""Making a record of one or two recorded runs: settling sources, and marking what is opaque."""

import dataclasses
import difflib
import re

import torch
from torch import Tensor, nn

from .nested import replace
from .network import Network
from .record import Call, ModuleFrame, Value
from .recorder import DATA_READS, CallDraft, Recorder, Ref

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
    """One recorded run: modes of the modules by path, indices of inputs and outputs, and how it ended."""

    recorder: Recorder
    modes: dict[str, bool]
    grad: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    error: str | None = None
    drew: tuple[str, ...] = ()


def _unknown(run: RecordedRun) -> dict[int, int]:
    """The tensors of a run that are neither registered nor computed in it: identity and value."""
    values = run.recorder.values
    return {id(t): v for v, t in run.recorder.outside.items() if values[v].source == "unseen"}


def assemble(model: nn.Module, run: RecordedRun, other: RecordedRun | None, guessed: bool) -> Network:
    """The record of a run. ``other`` is a run in the other mode; None where the first did not end.

    A tensor of unknown origin that both runs meet existed before the second one, so it is a constant.
    """
    both = {} if other is None else _unknown(other)
    for identity, value in _unknown(run).items():
        if identity in both:
            run.recorder.values[value].source = "constant"
    network = _frozen(model, run, guessed)
    if other is None:
        return network
    if other.error is not None:
        reason = f"in {'training' if other.modes[''] else 'evaluation'} {other.error}"
        return dataclasses.replace(network, reasons=(*network.reasons, reason))
    return _marked_by_mode(network, _frozen(model, other, guessed))


def _origins(recorder: Recorder) -> list[set[str]]:
    """From which sources every value was computed, and whether with random numbers; marks calls that are opaque."""
    origins: list[set[str]] = [{draft.source} for draft in recorder.values]
    for call in recorder.calls:
        befores = [before for before, _ in call.mutates]
        come = {origin for value in (*call.inputs, *befores) for origin in origins[value]}
        come |= {"random"} if _RANDOM.search(call.name) else set()
        for value in (*call.outputs, *(after for _, after in call.mutates)):
            origins[value] = come
        call.opaque = call.opaque or _reason(recorder, call, come)
    return origins


def _reason(recorder: Recorder, call: CallDraft, come: set[str]) -> str | None:
    if any(recorder.values[value].source == "unseen" for value in call.inputs):
        return f"{call.name} takes a tensor that was computed where the recorder does not see it"
    if call.name == "data=":
        return "assigns .data, which neither autograd nor the recorder follows"
    if call.name in DATA_READS:
        come = {"parameter" if origin == "buffer" else origin for origin in come}
        return next((f"{call.name} {words}" for origin, words in _READS.items() if origin in come), None)
    return None


def _frozen(model: nn.Module, run: RecordedRun, guessed: bool) -> Network:
    recorder = run.recorder
    values = tuple(
        Value(i, v.source, v.name, v.shape, v.dtype, frozenset(origins), v.call)
        for i, (v, origins) in enumerate(zip(recorder.values, _origins(recorder), strict=True))
    )
    frames = tuple(
        ModuleFrame(i, f.path, f.kind, f.run, f.parent, _pick(values, f.inputs), _pick(values, f.outputs))
        for i, f in enumerate(recorder.frames)
    )
    calls = tuple(_call(i, draft, values, frames) for i, draft in enumerate(recorder.calls))
    training = run.modes[""]
    outputs = _pick(values, run.outputs)
    return Network(
        model, calls, frames, values, _pick(values, run.inputs), outputs, training, guessed, run.error is None,
        _reasons(run, outputs), run.modes, run.grad, _held(recorder),
    )  # fmt: skip


def _pick(values: tuple[Value, ...], indices: tuple[int, ...]) -> tuple[Value, ...]:
    return tuple(values[index] for index in indices)


def _call(index: int, draft: CallDraft, values: tuple[Value, ...], frames: tuple[ModuleFrame, ...]) -> Call:
    args, kwargs = replace((draft.args, dict(draft.kwargs)), Ref, lambda ref: values[ref.value])
    return Call(
        index, draft.frame, draft.target, draft.name, frames[draft.frame].path, args, kwargs,
        _pick(values, draft.inputs), _pick(values, draft.outputs),
        tuple((values[before], values[after]) for before, after in draft.mutates),
        draft.site, draft.context, draft.opaque,
    )  # fmt: skip


def _reasons(run: RecordedRun, outputs: tuple[Value, ...]) -> tuple[str, ...]:
    if run.error is not None:
        return (run.error,)
    found = [f"the forward draws from {name}, whose numbers are not recorded" for name in run.drew]
    if not outputs:
        found.append("the forward returns no tensor that the reader finds")
    if any(value.source == "unseen" for value in outputs):
        found.append("an output was computed where the recorder does not see it")
    return tuple(found)


def _held(recorder: Recorder) -> dict[int, Tensor]:
    """The tensors that are not parameters or buffers and that recomputing needs."""
    with torch._C.DisableTorchFunction():
        found = {i: t for i, t in recorder.outside.items() if recorder.values[i].source in ("constant", "unseen")}
        found.update(recorder.stray)
        return {index: tensor.detach() for index, tensor in found.items()}


def _marked_by_mode(network: Network, other: Network) -> Network:
    """Mark the calls that the other mode does not make."""
    here, there = "training" if network.training else "evaluation", "training" if other.training else "evaluation"
    ours, theirs = ([(call.path, call.name) for call in n.live] for n in (network, other))
    if ours == theirs:
        return network
    blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    only = {network.live[i].index for tag, low, high, _, _ in blocks if tag != "equal" for i in range(low, high)}
    missing = [theirs[i] for tag, _, _, low, high in blocks if tag != "equal" for i in range(low, high)]
    calls = tuple(
        dataclasses.replace(call, opaque=f"{call.name} is called in {here} only")
        if call.index in only and call.opaque is None
        else call
        for call in network.calls
    )
    reasons = network.reasons
    if missing:
        path, name = missing[0]
        reasons += (f"{name} in {path or 'the network'} is called in {there} only, like {len(missing)} calls in all",)
    return dataclasses.replace(network, calls=calls, reasons=reasons)
