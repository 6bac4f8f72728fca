"""Layers on several processes: accuracy and time of synchronous and asynchronous exchange."""

import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from minimand.train.lifted import LPOM, Epoch, LayerParallel, layer_stages

from ...claims import combine, judge_bound, scale
from ...comparing import Difference, difference
from ...context import Lab
from ...drawing import bars, curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._lifted import LiftedOptions, RowBatches, correct, network, relative_time, trained

SEIDEL, JACOBI = "one process, Gauss–Seidel", "one process, Jacobi"
THREADS, SGD = "one process, Gauss–Seidel, all threads", "SGD"
#: The cost model, whose estimates stand beside the measured times.
MODEL = "cost model"
#: What layers on several processes are compared with.
CONTROLS = (SEIDEL, JACOBI, THREADS, SGD)
MODES = ("synchronous", "asynchronous")


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
    """The controls, several processes in both modes, and the cost model."""
    return [Part(part) for part in (*trainings(options), MODEL)]


def trainings(options: LPOMParallelOptions) -> list[str]:
    """The parts that train."""
    return [*CONTROLS, *several(options)]


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
    model = network(options.net, data.train.x.shape[1], data.classes)
    batches = data.restarted(lab)
    if part == MODEL:
        x, y = next(iter(batches))
        for count in ranks(options):
            found = layer_stages(LPOM(model), x, y, count)
            yield {"ranks": count, f"estimate {count}": found.speedup, "table": str(found)}
        return
    history: list[Epoch] = []
    if part == SGD:
        history = list(trained("SGD", options.sgd_rates[0], model, batches, options.epochs))
    elif part in CONTROLS:
        sweep, threads = "jacobi" if part == JACOBI else "gauss_seidel", torch.get_num_threads()
        torch.set_num_threads(max(options.processes) if part == THREADS else 1)
        try:
            for epoch in LPOM(model, sweep=sweep).training(batches, options.epochs):
                history.append(epoch)
                lab.notify(epoch.number, options.epochs)
        finally:
            torch.set_num_threads(threads)
    else:
        history = _spread(options, part, model, batches)
    for epoch in history:
        yield {"epoch": epoch.number, "loss": epoch.energy, "epoch_seconds": epoch.seconds}
    pace = statistics.median(epoch.seconds for epoch in history)
    yield {"epoch_seconds": pace, "validation": correct(model, data.validation), "test": correct(model, data.test)}


def _spread(options: LPOMParallelOptions, part: str, model: torch.nn.Module, batches: RowBatches) -> list[Epoch]:
    """Train the layers of ``model`` on several processes; afterwards it has their weights."""
    count, mode = int(part.split()[0]), part.rpartition(", ")[2]
    assert batches.generator is not None
    seed = batches.generator.initial_seed()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (count, folder, options, mode == "asynchronous", model, batches.x, batches.y, batches.batch, seed)
        spawn(_work, args=arguments, nprocs=count)
        found = torch.load(Path(folder) / "trained.pt", weights_only=True)
    model.load_state_dict(found["model"])
    return [Epoch(*numbers) for numbers in found["history"]]


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
    history = parallel.fit(batches, options.epochs)
    if rank == 0:
        numbers = [dataclasses.astuple(epoch) for epoch in history]
        torch.save({"model": model.state_dict(), "history": numbers}, Path(folder) / "trained.pt")
    dist.destroy_process_group()


def compare(results: Results[LPOMParallelOptions]) -> list[Comparison]:
    """Accuracies, and times relative to one process."""
    rows = [Comparison(part, None, results.final(part, "test"), "%") for part in trainings(results.options)]
    ours = several(results.options)
    rows += [relative_time(results, part, JACOBI, f"{part}: an epoch in Jacobi's time") for part in ours]
    for other in (THREADS, SGD):
        rows += [relative_time(results, part, other, f"{part}: an epoch in the time of {other}") for part in ours]
    rows.append(relative_time(results, JACOBI, SEIDEL, "Jacobi: an epoch in Gauss–Seidel's time"))
    return [*rows, *_estimates(results)]


def _estimates(results: Results[LPOMParallelOptions]) -> list[Comparison]:
    """The speed-ups of asynchronous processes that the cost model estimates, beside the measured ones."""
    found = []
    for count in ranks(results.options):
        label = f"{count} processes, asynchronous: speed-up over one process with Gauss–Seidel"
        found.append(Comparison(f"{label}, estimated", None, results.final(MODEL, f"estimate {count}"), "×"))
        if count in results.options.processes:
            times = relative_time(results, name("asynchronous", count), SEIDEL, "").measured
            measured = [1 / max(ratio, 1e-9) for ratio in times]
            found.append(Comparison(f"{label}, measured", None, measured, "×"))
    return found


def plots(results: Results[LPOMParallelOptions]) -> list[Plot]:
    """Losses, and the table."""
    rows, names = compare(results), trainings(results.options)
    count, end = len(names), -len(_estimates(results))
    return [
        curves(results, names, key="loss", title="Loss", y="mean squared error", log=True),
        bars(rows[:count], title="Accuracy", y="test accuracy, %"),
        bars(rows[count:end], title="Time of an epoch, relative", y="ratio"),
    ]


def findings(results: Results[LPOMParallelOptions]) -> Sequence[str | Difference]:
    """Each mode against one process, in accuracy and in time."""
    ours = several(results.options)
    pairs = [*((part, JACOBI) for part in ours), (JACOBI, SEIDEL), *((part, SGD) for part in ours)]
    sentences: list[str | Difference] = [difference(results, *pair) for pair in pairs]
    for other in CONTROLS:
        sentences += [_speed_up(results, part, other) for part in ours if other != part]
    return sentences


def claims(results: Results[LPOMParallelOptions]) -> list[Claim]:
    """Layers on several processes save time over the best sweep of one process."""
    count = results.options.processes[0]
    speed = {
        mode: [1 / max(ratio, 1e-9) for ratio in relative_time(results, name(mode, count), SEIDEL, "").measured]
        for mode in MODES
    }
    shown = ", ".join(f"{mode} {statistics.fmean(values):.2f}×" for mode, values in speed.items() if values)
    return [
        Claim(
            "Parallelizing LPOM: layers on several processes are faster than one process",
            "–",
            f"{shown} the speed of one process (Gauss–Seidel), {count} processes" if shown else "–",
            scale(results, f"{results.options.limit or 54_000:,} MNIST images", f"{results.options.epochs} epochs"),
            combine([judge_bound([1 / value for value in values], 1.0) for values in speed.values()]),
        )
    ]


def _speed_up(results: Results[LPOMParallelOptions], part: str, other: str) -> str:
    """A sentence on the speed-up of an epoch, with its range over the seeds."""
    ratios = [1 / max(ratio, 1e-9) for ratio in relative_time(results, part, other, "").measured]
    if not ratios:
        return f"The times of {part} and {other} have no seed in common yet."
    span = f"{min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} seeds" if len(ratios) > 1 else "one seed"
    return f"An epoch of {part} is {statistics.fmean(ratios):.2f} times as fast as one of {other} ({span})."


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
        "--jobs 1 on an otherwise idle machine. Each process has one thread, but for that control."
    ),
    presets={
        "smoke": Preset(LPOMParallelOptions(batch=50, limit=200, epochs=1, dataset="digits", net="20-15"), (0,), 0.3),
        "laptop": Preset(LPOMParallelOptions(limit=4_000), (0, 1, 2, 3, 4), 45),
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
