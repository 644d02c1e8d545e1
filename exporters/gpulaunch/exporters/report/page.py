"""Writes a document as HTML: the body that the live page shows, and a report that is one self-contained page.

All untrusted text goes through `_text`: control characters are made visible, then HTML is escaped. Should anything get
past it, the Content-Security-Policy of either page blocks all other scripts and all loading.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
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
    as_table,
)
from gpulaunch.exporters.report.svg import COLOURS, still
from gpulaunch.exporters.view.text import inert

ASSETS: Final = Path(__file__).parent / "assets"
"""The style sheet, and the script that draws the charts with Plotly: of both pages."""
_LONGEST_CELL: Final = 2000


def as_html(document: Document, *, library: str | None = None) -> str:
    """Return the report.

    Args:
        document: the content.
        library: the source of plotly.js, to be embedded; None: static charts.
    """
    charts = document.charts()
    scripts: list[str] = []
    if library and charts:
        scripts = [library.replace("\r\n", "\n").replace("\r", "\n"), (ASSETS / "draw.js").read_text()]
    sources = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="gpulaunch">',
            f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy, quote=True)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{_text(document.title)}: {_text(document.status)} - gpulaunch report</title>",
            f"<style>{(ASSETS / 'page.css').read_text()}</style></head><body>",
            '<a class="skip" href="#main">Skip to the bottlenecks</a>',
            body_of(document),
            f"<footer><p>{_text(document.made)}</p></footer>",
            *([f'<script type="application/json" id="charts">{_json(charts)}</script>'] if scripts else []),
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        )
    )


def body_of(document: Document) -> str:
    """Return the header, the navigation and the sections, as HTML."""
    lead, *more = document.lead or ("",)
    status = _text(document.status)
    figures = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in document.figures)
    return "\n".join(
        (
            f'<header><h1>{_text(document.title)} <span class="badge" data-status="{status}">{status}</span></h1>',
            f'<p class="{"lead alarm" if document.alarm else "lead"}">{_text(lead)}</p>',
            f'<dl class="figures">{figures}</dl>' if figures else "",
            f"<ul>{''.join(f'<li>{_text(each)}</li>' for each in more)}</ul>" if more else "",
            '</header><nav aria-label="Sections"><ul>',
            *(f'<li><a href="#{_id(each.id)}">{_text(each.title)}</a></li>' for each in document.sections),
            '</ul></nav><main id="main" tabindex="-1">',
            *(_section(section, 2) for section in document.sections),
            "</main>",
        )
    )


def _section(section: Section, level: int) -> str:
    body = "\n".join(_blocks(section.blocks))
    parts = "\n".join(_section(part, level + 1) for part in section.parts)
    name = _id(section.id)
    return (
        f'<section id="{name}" aria-labelledby="{name}-heading">'
        f'<h{level} id="{name}-heading">{_text(section.title)}</h{level}>\n{body}\n{parts}</section>'
    )


def _blocks(blocks: Sequence[Block]) -> Iterator[str]:
    """Yield the blocks; charts that follow each other stand side by side where there is room."""
    for of_charts, group in itertools.groupby(blocks, key=lambda block: isinstance(block, Chart)):
        told = "\n".join(map(_block, group))
        yield f'<div class="charts" data-key="charts">{told}</div>' if of_charts else told


def _block(block: Block) -> str:
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
    return _chart(block)


def _chart(chart: Chart) -> str:
    legend = "".join(
        f'<li><span class="swatch c{series.colour % COLOURS}"></span>{_text(series.name)}</li>'
        for series in chart.shown
    )
    # The element in which the library draws stays hidden where it does not.
    return (
        f'<figure id="figure-{_id(chart.id)}"><figcaption>{_text(chart.title)} ({_text(chart.unit)})</figcaption>'
        f'{still(chart)}<div class="live replaced" role="img" aria-label="{_text(f"{chart.title}. {chart.summary}")}">'
        f"</div>{f'<ul class=legend>{legend}</ul>' if len(chart.shown) > 1 else ''}"
        f'<p class="quiet">{_text(chart.summary)}</p>'
        f'<details><summary>As a table<span class="unseen">: {_text(chart.title)}</span></summary>'
        f"{_table(chart.table or as_table(chart))}</details></figure>"
    )


def _table(table: Table, *, headless: bool = False) -> str:
    head = (
        ""
        if headless
        else f"<thead><tr>{''.join(f'<th scope=col{_class(each)}>{_text(each.title)}</th>' for each in table.columns)}"
        "</tr></thead>"
    )
    body = "".join(f"<tr>{''.join(_cells(row, table.columns))}</tr>" for row in table.rows)
    caption, key = _text(table.caption), _text(re.split(r"[:;(]", table.caption)[0])
    # A wide table scrolls separately: it needs keyboard focus and a label for screen readers.
    return (
        f'<div class="wide" data-key="{key}" role="group" tabindex="0" aria-label="{caption}"><table>'
        f"<caption>{caption}</caption>{head}<tbody>{body}</tbody></table></div>"
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
    data = json.dumps(chart_data(charts), allow_nan=False, separators=(",", ":"))
    for each in "<>&":  # nothing in it ends its element
        data = data.replace(each, f"\\u{ord(each):04x}")
    return data


def chart_data(charts: Iterable[Chart]) -> list[dict[str, Any]]:
    """Return the charts as plain values for the script that draws them."""
    return [
        {
            "id": _id(chart.id),
            "kind": chart.kind,
            "unit": inert(chart.unit),
            "labels": [inert(label) for label in chart.labels],
            "times": [_number(time) for time in chart.times],
            "time_unit": inert(chart.time_unit),
            "series": [
                {
                    "name": inert(series.name),
                    "colour": series.colour % COLOURS,
                    "values": [_number(value) for value in series.values],
                    "on_request": series.on_request,
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


def _number(value: float | None) -> float | None:
    rounded = math.nan if value is None else float(f"{value:.5g}")  # which may round up to infinity
    return rounded if math.isfinite(rounded) else None
