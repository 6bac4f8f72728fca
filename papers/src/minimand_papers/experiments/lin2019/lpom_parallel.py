"""Layers on several processes: accuracy and time of synchronous and asynchronous exchange."""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from minimand.train.lifted import LPOM, Epoch, LayerParallel, layer_stages

from ...claims import combine, judge_bound, not_run, scale
from ...comparing import Difference, difference
from ...context import Lab
from ...drawing import bars, curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._lifted import CONTROL, LiftedOptions, RowBatches, correct, network, relative_time, tuned

SEIDEL, JACOBI = "one process, Gauss–Seidel", "one process, Jacobi"
THREADS = "one process, Gauss–Seidel, all threads"
#: The cost model, whose estimates stand beside the measured times.
MODEL = "cost model"
#: LPOM in one process, and what every method is compared with, tuned on the validation images.
ALONE, OTHERS = (SEIDEL, JACOBI, THREADS), ("SGD", "Adam", CONTROL)
MODES = ("synchronous", "asynchronous")
CLAIM = "Parallelizing LPOM: layers on several processes are faster than one process"
CLOCK, PROCESSOR = "epoch_seconds", "processor_seconds"
#: Below this share of a core the times by the clock are those of a busy machine.
BUSY = 0.9


@dataclasses.dataclass(frozen=True)
class LPOMParallelOptions(LiftedOptions):
    """One network, its layers on one process and on several.

    Args:
        dataset: A name from ``minimand_papers.data.registry``.
        net: Hidden widths.
        processes: Numbers of processes that share the layers.
        estimated: Numbers of processes for which the cost model estimates the gain, besides the measured ones.
        staleness: The largest number of batches in flight in asynchronous mode; 0: twice the processes above.
    """

    dataset: str = "mnist"
    net: str = "1500-1500-1500-1500"
    processes: tuple[int, ...] = (2,)
    estimated: tuple[int, ...] = (3, 4)
    staleness: int = 0
    epochs: int = 3


def name(mode: str, processes: int) -> str:
    """A part's name."""
    return f"{processes} processes, {mode}"


def parts(options: LPOMParallelOptions) -> list[Part]:
    """One process, several in both modes, the other methods, and the cost model."""
    return [Part(part) for part in (*trainings(options), MODEL)]


def trainings(options: LPOMParallelOptions) -> list[str]:
    """The parts that train."""
    return [*ALONE, *several(options), *OTHERS]


def several(options: LPOMParallelOptions) -> list[str]:
    """The parts with several processes."""
    return [name(mode, count) for count in options.processes for mode in MODES]


def ranks(options: LPOMParallelOptions) -> list[int]:
    """The numbers of processes of the cost model, at most one a layer."""
    layers = len(options.net.split("-")) + 1
    return [count for count in sorted({*options.processes, *options.estimated}) if count <= layers]


def run(options: LPOMParallelOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train from the same weights on the same batches."""
    data = options.data(lab, options.dataset)

    def build() -> torch.nn.Module:
        return network(options.net, data.train.x.shape[1], data.classes)

    if part in OTHERS:
        for record in tuned(options, part, build, data, lab):
            yield {**record, **({PROCESSOR: record[CLOCK]} if CLOCK in record else {})}
        return
    model, batches = build(), data.restarted(lab)
    if part == MODEL:
        x, y = next(iter(batches))
        for count in ranks(options):
            found = layer_stages(LPOM(model), x, y, count)
            numbers = {f"estimate {count}": found.speedup, f"milliseconds {count}": 1e3 * found.seconds}
            yield {"ranks": count, **numbers, "table": str(found)}
        return
    history, seconds = (_alone if part in ALONE else _spread)(options, part, model, batches)
    for epoch in history:
        yield {"epoch": epoch.number, "loss": epoch.energy, CLOCK: epoch.seconds}
    pace = {CLOCK: statistics.median(epoch.seconds for epoch in history), PROCESSOR: seconds / options.epochs}
    pace["milliseconds"] = 1e3 * pace[PROCESSOR] / len(batches)
    yield {**pace, "validation": correct(model, data.validation), "test": correct(model, data.test)}


def _alone(
    options: LPOMParallelOptions, part: str, model: torch.nn.Module, batches: RowBatches
) -> tuple[list[Epoch], float]:
    """Train in one process; the processor seconds are those of one thread."""
    threads, used = torch.get_num_threads(), max(options.processes) if part == THREADS else 1
    torch.set_num_threads(used)
    try:
        method, begin = LPOM(model, sweep="jacobi" if part == JACOBI else "gauss_seidel"), time.process_time()
        return method.fit(batches, options.epochs), (time.process_time() - begin) / used
    finally:
        torch.set_num_threads(threads)


def _spread(
    options: LPOMParallelOptions, part: str, model: torch.nn.Module, batches: RowBatches
) -> tuple[list[Epoch], float]:
    """Train the layers of ``model`` on several processes; the processor seconds are those of the busiest.

    Afterwards ``model`` has their weights.
    """
    count, mode = int(part.split()[0]), part.rpartition(", ")[2]
    assert batches.generator is not None
    seed = batches.generator.initial_seed()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (count, folder, options, mode == "asynchronous", model, batches.x, batches.y, batches.batch, seed)
        spawn(_work, args=arguments, nprocs=count)
        found = torch.load(Path(folder) / "trained.pt", weights_only=True)
    model.load_state_dict(found["model"])
    return [Epoch(*numbers) for numbers in found["history"]], float(found["seconds"])


def _work(
    rank: int,
    count: int,
    folder: str,
    options: LPOMParallelOptions,
    asynchronous: bool,
    model: torch.nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    batch: int,
    seed: int,
) -> None:
    """The work of one process; every process iterates over the same batches."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    batches = RowBatches(x, y, batch, torch.Generator().manual_seed(seed))
    method = LPOM(model, sweep="jacobi")
    parallel = LayerParallel(method, asynchronous=asynchronous, staleness=options.staleness or None)
    begin = time.process_time()
    history = parallel.fit(batches, options.epochs)
    seconds = torch.tensor([time.process_time() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if rank == 0:
        numbers = [dataclasses.astuple(epoch) for epoch in history]
        found = {"model": model.state_dict(), "history": numbers, "seconds": float(seconds)}
        torch.save(found, Path(folder) / "trained.pt")
    dist.destroy_process_group()


def compare(results: Results[LPOMParallelOptions]) -> list[Comparison]:
    """Accuracies, and times relative to one process; on a busy machine processor times only."""
    rows = [Comparison(part, None, results.final(part, "test"), "%") for part in trainings(results.options)]
    return [*rows, *_times(results), *_estimates(results)]


def _times(results: Results[LPOMParallelOptions]) -> list[Comparison]:
    ours = several(results.options)
    pairs: list[tuple[str, str, str, str]] = []
    if not _busy(results):
        pairs += [(CLOCK, part, other, "an epoch in the time of") for other in (JACOBI, THREADS) for part in ours]
        pairs.append((CLOCK, JACOBI, SEIDEL, "an epoch in the time of"))
    if results.final(SEIDEL, PROCESSOR):
        words = "processor time of an epoch over that of"
        pairs += [(PROCESSOR, part, other, words) for other in (*ALONE, "SGD") for part in ours]
    return [relative_time(results, part, other, f"{part}: {words} {other}", key) for key, part, other, words in pairs]


def _estimates(results: Results[LPOMParallelOptions]) -> list[Comparison]:
    """The speed-ups of asynchronous processes that the cost model estimates, beside the measured ones."""
    found = []
    for count in ranks(results.options):
        label = f"{count} processes, asynchronous: speed-up over one process with Gauss–Seidel"
        found.append(Comparison(f"{label}, estimated", None, results.final(MODEL, f"estimate {count}"), "×"))
        if count in results.options.processes:
            part = name("asynchronous", count)
            measures = {"by the clock": CLOCK, "in processor time": PROCESSOR}
            found += [
                Comparison(f"{label}, {how}", None, values, "×")
                for how, key in measures.items()
                if (values := _speed_ups(results, part, SEIDEL, key)) and not (key == CLOCK and _busy(results))
            ]
    return found


def _speed_ups(results: Results[LPOMParallelOptions], part: str, other: str, key: str) -> list[float]:
    """The time of another part over that of a part, for each seed."""
    return [1 / max(ratio, 1e-9) for ratio in relative_time(results, part, other, "", key).measured]


def plots(results: Results[LPOMParallelOptions]) -> list[Plot]:
    """Losses, and the table."""
    names = trainings(results.options)
    return [
        curves(results, names, key="loss", title="Loss", y="mean squared error", log=True),
        bars(compare(results)[: len(names)], title="Accuracy", y="test accuracy, %"),
        bars(_times(results), title="Time of an epoch, relative", y="ratio"),
    ]


def findings(results: Results[LPOMParallelOptions]) -> Sequence[str | Difference]:
    """Each mode against one process and SGD, the cost model against the run, and how busy the machine was."""
    ours = several(results.options)
    pairs = [*((part, JACOBI) for part in ours), (JACOBI, SEIDEL), *((part, "SGD") for part in ours)]
    return [*(difference(results, *pair) for pair in pairs), *_checked_model(results), *_busy(results)]


def _checked_model(results: Results[LPOMParallelOptions]) -> list[str]:
    """The estimated milliseconds of a batch beside the processor time of the busiest process."""
    found = []
    for count in results.options.processes:
        estimates = results.final(MODEL, f"milliseconds {count}")
        measured = results.final(name("asynchronous", count), "milliseconds")
        if estimates and measured:
            found.append(
                f"The cost model estimates {statistics.fmean(estimates):.1f} ms for a batch on {count} asynchronous "
                f"processes; the busiest process computed for {statistics.fmean(measured):.1f} ms, waiting not counted."
            )
    return found


def _share(results: Results[LPOMParallelOptions]) -> float:
    """The share of a core that one process had."""
    processor, clock = (results.final(SEIDEL, key) for key in (PROCESSOR, CLOCK))
    return statistics.fmean(processor) / statistics.fmean(clock) if processor and clock else 1.0


def _busy(results: Results[LPOMParallelOptions]) -> list[str]:
    if (share := _share(results)) >= BUSY:
        return []
    return [
        f"The machine was busy: one process had {share:.0%} of a core. So times by the clock say nothing and are left "
        f"out; processor times do not contain how long a process waits for another."
    ]


def claims(results: Results[LPOMParallelOptions]) -> list[Claim]:
    """Layers on several processes save time over the best sweep of one process; not judged on a busy machine."""
    if _busy(results):
        return [not_run(CLAIM, "–", "the machine was busy")]
    count = results.options.processes[0]
    speed = {mode: _speed_ups(results, name(mode, count), SEIDEL, CLOCK) for mode in MODES}
    shown = ", ".join(f"{mode} {statistics.fmean(values):.2f}×" for mode, values in speed.items() if values)
    words = (f"{results.options.limit or 54_000:,} MNIST images", f"{results.options.epochs} epochs")
    return [
        Claim(
            CLAIM,
            "–",
            f"{shown} the speed of one process (Gauss–Seidel), {count} processes" if shown else "–",
            scale(results, *words),
            combine([judge_bound([1 / value for value in values], 1.0) for values in speed.values()]),
        )
    ]


experiment = Experiment(
    name="lpom-parallel",
    title="Layers on several processes",
    source="[Lin2019], Parallelizing LPOM",
    about=(
        "The layers of one network are distributed over processes that exchange only the activations at their "
        "boundaries. In synchronous mode they compute the Jacobi sweeps of one process. In asynchronous mode they "
        "continue with the next batch while messages are in flight. The controls are one process with Jacobi "
        "sweeps, one with Gauss–Seidel sweeps, which cannot be distributed, the same with as many threads as there "
        "are processes, and SGD. A cost model estimates the speed-up of asynchronous processes from the times of the "
        "layers in one process; its estimate stands beside the measured one. Times are the purpose: run it with "
        "--jobs 1 on an otherwise idle machine. Each process has one thread, but for that control. Processor "
        "times are those of the busiest process, or of one of several threads on average; waiting is not part of them. "
        "SGD, Adam and the control (random hidden layers with a ridge regression on top) have two candidates each, of "
        "which a tenth of the training images chooses one; LPOM has one."
    ),
    presets={
        "smoke": Preset(LPOMParallelOptions(batch=50, limit=200, epochs=1, dataset="digits", net="20-15"), (0,), 0.3),
        "laptop": Preset(LPOMParallelOptions(limit=3_000, net="1000-1000-1000-1000"), (0, 1, 2, 3, 4), 15),
        "paper": Preset(
            LPOMParallelOptions(net="4000-4000-4000-4000-4000", processes=(2, 3), epochs=20), (0, 1, 2), 2000
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("loss",),
)
