"""The report: one self-contained HTML page, and the same tables as Markdown."""

from .markdown import markdown
from .page import page, write_report

__all__ = ["markdown", "page", "write_report"]
