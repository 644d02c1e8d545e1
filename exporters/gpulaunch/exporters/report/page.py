"""Renders a document as one self-contained HTML page: no requests, and no scripts except those with a listed digest.

All untrusted text goes through `_text`: control characters are made visible, then HTML is escaped. Should anything get
past it, the page's Content-Security-Policy blocks all other scripts and all loading.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from typing import Any, Final

from gpulaunch.exporters.report.document import (
    Block,
    Chart,
    Column,
    Document,
    Facts,
    Items,
    Paragraph,
    Section,
    Table,
)
from gpulaunch.exporters.report.style import DRAW, STYLE
from gpulaunch.exporters.report.svg import COLOURS, still
from gpulaunch.exporters.view.text import inert

_LONGEST_CELL: Final = 2000


def as_html(document: Document, *, library: str | None = None) -> str:
    """Return the page.

    Args:
        document: the content.
        library: the source of plotly.js, to be embedded; None: static charts.
    """
    charts = document.charts()
    scripts = [library.replace("\r\n", "\n").replace("\r", "\n"), DRAW] if library and charts else []
    sources = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = [f'<script type="application/json" id="charts">{_json(charts)}</script>'] if scripts else []
    lead, *more = document.lead or ("",)
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="gpulaunch">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=True)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{_text(document.title)}: {_text(document.status)} - gpulaunch report</title>",
            f"<style>{STYLE}</style></head><body>",
            '<a class="skip" href="#losses">Skip to what held the run back</a>',
            f"<header><h1>{_text(document.title)}</h1>",
            f'<p class="lead">{_text(lead)}</p>',
            f"<ul>{''.join(f'<li>{_text(each)}</li>' for each in more)}</ul>" if more else "",
            '<nav aria-label="Sections"><ul>',
            *(f'<li><a href="#{_id(each.id)}">{_text(each.title)}</a></li>' for each in document.sections),
            "</ul></nav></header><main>",
            *(_section(section, 2, live=bool(scripts)) for section in document.sections),
            f"</main><footer><p>{_text(document.made)}</p></footer>",
            *data,
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        )
    )


def _section(section: Section, level: int, *, live: bool) -> str:
    body = "\n".join(_block(block, live=live) for block in section.blocks)
    parts = "\n".join(_section(part, level + 1, live=live) for part in section.parts)
    name = _id(section.id)
    return (
        f'<section aria-labelledby="{name}-heading"><div id="{name}"></div>'
        f'<h{level} id="{name}-heading">{_text(section.title)}</h{level}>\n{body}\n{parts}</section>'
    )


def _block(block: Block, *, live: bool) -> str:
    if isinstance(block, Paragraph):
        return f"<p>{_text(block.text)}</p>"
    if isinstance(block, Items):
        return f"<ul>{''.join(f'<li>{_text(each)}</li>' for each in block.texts)}</ul>"
    if isinstance(block, Facts):
        return _table(
            Table(caption=block.caption, columns=(Column("What"), Column("Value")), rows=block.pairs), headless=True
        )
    if isinstance(block, Table):
        return _table(block)
    return _chart(block, live=live)


def _chart(chart: Chart, *, live: bool) -> str:
    legend = "".join(
        f'<li><span class="swatch c{series.colour % COLOURS}"></span>{_text(series.name)}</li>'
        for series in chart.series
    )
    name = _id(chart.id)
    place = f'<div class="live replaced" role="img" aria-label="{_text(chart.title)}"></div>' if live else ""
    figures = (
        f"<details><summary>As a table: {_text(chart.title)}</summary>{_table(chart.table)}</details>"
        if chart.table is not None
        else ""
    )
    return (
        f'<figure id="figure-{name}"><figcaption>{_text(chart.title)} ({_text(chart.unit)})</figcaption>'
        f"{still(chart)}{place}{f'<ul class=legend>{legend}</ul>' if len(chart.series) > 1 else ''}"
        f'<p class="soft">{_text(chart.summary)}</p>{figures}</figure>'
    )


def _table(table: Table, *, headless: bool = False) -> str:
    name = f"table-{_digest(table.caption)[:10]}".replace("+", "-").replace("/", "_")
    head = (
        ""
        if headless
        else f"<thead><tr>{''.join(f'<th scope=col{_class(each)}>{_text(each.title)}</th>' for each in table.columns)}"
        "</tr></thead>"
    )
    body = "".join(f"<tr>{''.join(_cells(row, table.columns))}</tr>" for row in table.rows)
    # A wide table scrolls separately: it needs keyboard focus and a label for screen readers.
    return (
        f'<div class="wide" role="region" tabindex="0" aria-labelledby="{name}"><table><caption id="{name}">'
        f"{_text(table.caption)}</caption>{head}<tbody>{body}</tbody></table></div>"
    )


def _cells(row: tuple[str, ...], columns: tuple[Column, ...]) -> Iterable[str]:
    for index, (cell, column) in enumerate(zip(row, columns, strict=True)):
        if index == 0:
            yield f"<th scope=row{_class(column)}>{_text(cell)}</th>"
        else:
            yield f"<td{_class(column)}>{_text(cell)}</td>"


def _class(column: Column) -> str:
    return " class=n" if column.number else " class=code" if column.code else ""


def _text(text: str) -> str:
    """Escape untrusted text for content and for quoted attributes."""
    cut = text if len(text) <= _LONGEST_CELL else text[:_LONGEST_CELL] + "..."
    return html.escape(inert(cut), quote=True)


def _id(name: str) -> str:
    """Make a safe HTML id; the names are our own, but are restricted all the same."""
    return html.escape("".join(each if each.isalnum() or each in "-_" else "-" for each in name), quote=True)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()).decode("ascii")


def _json(charts: Iterable[Chart]) -> str:
    """Return the charts as JSON for the script: no `<` in it can end the block."""
    content: list[dict[str, Any]] = [
        {
            "id": _id(chart.id),
            "kind": chart.kind,
            "unit": inert(chart.unit),
            "time_unit": inert(chart.time_unit),
            "labels": [inert(label) for label in chart.labels],
            "times": [_number(time) for time in chart.times],
            "series": [
                {
                    "name": inert(series.name),
                    "colour": series.colour % COLOURS,
                    "values": [_number(value) for value in series.values],
                }
                for series in chart.series
            ],
            "spans": [
                {
                    "label": inert(span.label),
                    "text": inert(span.text),
                    "begin": _number(span.begin),
                    "end": _number(span.end),
                    "colour": span.colour % COLOURS,
                }
                for span in chart.spans
            ],
        }
        for chart in charts
    ]
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _number(value: float | None) -> float | None:
    return None if value is None or value != value or value in (float("inf"), float("-inf")) else float(f"{value:.5g}")
