"""The report: one self-contained HTML page, one Markdown page per source, and tables in CSV."""

from .page import page, write_report
from .pages import write_pages
from .tables import write_tables

__all__ = ["page", "write_pages", "write_report", "write_tables"]
