"""``python -m minimand_papers`` is the command ``minimand``."""

from .cli import main

if __name__ == "__main__":
    main()
