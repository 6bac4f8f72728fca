"""The program ``minimand``, also as ``python -m minimand_papers`` and under ``torchrun``."""

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point; Ctrl-C while the packages are imported ends it as quietly as later."""
    try:
        from .cli import main as command
    except KeyboardInterrupt:
        print("minimand: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    command()


if __name__ == "__main__":
    main()
