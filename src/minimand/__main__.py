"""Deep networks as optimisation: see a layer solve its problem."""

from pathlib import Path

__all__ = ["main"]


def demo(out: Path = Path("runs"), iters: int = 60, seeds: int = 5) -> None:
    """Solve one layer's problem with every solver; print a table, draw the convergence.

    Example: minimand demo --out runs

    Args:
        out: Where the picture goes.
        iters: Iterations of every solver.
        seeds: How many runs the stochastic solvers are averaged over.
    """
    import torch
    from rich.console import Console

    from .lab import demo as lab

    # The matrices are small: a second thread would only wait for the first.
    torch.set_num_threads(1)
    console = Console()
    rows = lab.run(iters, seeds)
    path = out / "demo" / "convergence.png"
    lab.plot(rows, path)
    console.print(lab.table(rows))
    console.print(f"The stochastic solvers (dashed in the picture) are means over {seeds} seeds.")
    console.print(f"Picture: {path}")


def main() -> None:
    """Entry point."""
    import tyro

    tyro.extras.subcommand_cli_from_dict({"demo": demo}, prog="minimand", description=__doc__)


if __name__ == "__main__":
    main()
