"""Report pages of plans."""

from tilerec.viz.report import report_html, write_report

__all__ = ["report_html", "write_report"]
