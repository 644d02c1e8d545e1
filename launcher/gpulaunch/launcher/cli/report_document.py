"""The whole report of a run directory, without secrets: as an HTML page or as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpulaunch.exporters.report.document import Document


def as_page(run_dir: str, *, static: bool = False) -> str:
    """The whole report as an HTML page; `static`: without the library for charts, whether it is installed or not."""
    from gpulaunch.exporters.report.library import plotly_js
    from gpulaunch.exporters.report.page import as_html

    return as_html(_document(run_dir), library=None if static else plotly_js())


def as_markdown(run_dir: str) -> str:
    """The whole report as Markdown."""
    from gpulaunch.exporters.report import markdown

    return markdown.as_markdown(_document(run_dir))


def _document(run_dir: str) -> Document:
    """The whole report, without secrets: command lines and errors may hold some, and reports are passed on."""
    from gpulaunch.exporters.report.content import report_of
    from gpulaunch.exporters.report.document import rewritten
    from gpulaunch.exporters.view.load import load_run
    from gpulaunch.profiler.redact import redact

    return rewritten(report_of(load_run(run_dir)), redact)
