"""Progress bars: one per running part, with its epoch, metrics and remaining time."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from .experiment import Experiment, Metrics

__all__ = ["Display", "Event"]


@dataclasses.dataclass(frozen=True)
class Event:
    """A message from a part: epochs done, a record, or its end."""

    part: str
    seed: int
    done: float | None = None
    total: int | None = None
    metrics: Metrics | None = None
    finished: bool = False


class Display:
    """Bars in a terminal, a line per finished part elsewhere, nothing if ``quiet``."""

    def __init__(self, console: Any = None, *, quiet: bool = False) -> None:
        self.quiet = quiet
        if not quiet:
            from rich.console import Console

            self.console = console or Console()
        self._tasks: dict[tuple[str, int], Any] = {}
        self._last: dict[tuple[str, int], Metrics] = {}
        self._progress: Any = None

    @contextlib.contextmanager
    def of(self, experiment: Experiment[Any], jobs: int) -> Iterator[None]:
        """Show the bars of one experiment while it runs."""
        self._columns = experiment.columns
        if self.quiet:
            yield
            return
        from rich import progress
        from rich.markup import escape

        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[count]}"),
            progress.TextColumn("{task.fields[metrics]}", style="cyan", markup=False),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        about = escape(f"{experiment.title} ({experiment.source})")
        self.console.print(f"[bold]{escape(experiment.name)}[/bold]  {about}")
        with self._progress:
            fields = {"metrics": "", "count": f"0/{jobs}"}
            self._all = self._progress.add_task("[bold]all parts", total=jobs, **fields)
            self._jobs, self._ended = jobs, 0
            yield
        self._tasks.clear()
        self._last.clear()

    def __call__(self, event: Event) -> None:
        """Show a message from a part."""
        if self.quiet:
            return
        key = (event.part, event.seed)
        if event.metrics is not None:
            self._last[key] = event.metrics
        if event.finished:
            self._end(key)
            return
        if key not in self._tasks:
            from rich.markup import escape

            text = escape(f"{event.part} · seed {event.seed}")
            self._tasks[key] = self._progress.add_task(text, total=None, metrics="", count="")
        changes: dict[str, Any] = {}
        if event.done is not None and event.total is not None:
            changes = {"completed": event.done, "total": event.total}
            changes["count"] = f"{min(int(event.done) + 1, event.total)}/{event.total}"
        self._progress.update(self._tasks[key], metrics=self._text(key), **changes)

    def _text(self, key: tuple[str, int]) -> str:
        record = self._last.get(key, {})
        shown = ((name, record[name]) for name in self._columns if name in record)
        return "  ".join(f"{name} {value:.4g}" for name, value in shown if isinstance(value, int | float))

    def _end(self, key: tuple[str, int]) -> None:
        self._ended += 1
        self._progress.update(self._all, completed=self._ended, count=f"{self._ended}/{self._jobs}")
        if key in self._tasks:
            self._progress.remove_task(self._tasks.pop(key))
        record = self._last.get(key)
        if record is not None:
            numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
            text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items() if name != "epoch")
            self.console.print(f"  {key[0]} · seed {key[1]}: {text}", highlight=False, markup=False)
