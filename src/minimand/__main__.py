"""The command line: ``minimand`` and ``python -m minimand``."""

__all__ = ["main"]


def main() -> None:
    """Entry point."""
    try:
        from .lab.cli import main as command
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "minimand":
            raise
        raise SystemExit(f'minimand: the package {error.name} is missing: pip install "minimand[lab]"') from None
    command()


if __name__ == "__main__":
    main()
