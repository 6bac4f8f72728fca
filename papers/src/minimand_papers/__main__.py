"""The program ``minimand``, also as ``python -m minimand_papers`` and under ``torchrun``."""

import signal

__all__ = ["main"]


def main() -> None:
    """Entry point; Ctrl-C while the packages are imported ends it as quietly as later."""
    # An exception inside of torch's own initialisation would abort the process.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import main as command

    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
