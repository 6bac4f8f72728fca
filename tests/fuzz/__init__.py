"""Random tests of the library's promises, in campaigns; see ``campaigns.py`` and ``python -m tests.fuzz --help``."""
