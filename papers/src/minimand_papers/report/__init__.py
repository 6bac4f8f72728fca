"""The report: one self-contained HTML page, and one Markdown page per source."""

from .page import page, write_report
from .pages import write_pages

__all__ = ["page", "write_pages", "write_report"]
