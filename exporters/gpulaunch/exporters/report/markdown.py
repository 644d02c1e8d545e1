"""Renders a document as Markdown, for an issue or a chat: tables instead of charts."""

from __future__ import annotations

import re
from typing import Final

from gpulaunch.exporters.report.document import Block, Chart, Document, Facts, Items, Paragraph, Section, Table
from gpulaunch.exporters.view.text import inert

_LONGEST_CELL: Final = 500
_SPECIAL: Final = re.compile(r"([\\`*_\[\]#!|~$])")
_AT_FIRST: Final = re.compile(r"^(?=[-+=](?!$)|\d+[.)](?:\s|$))")
"""Start of a list, a rule, or a heading underline."""
_HTML: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}
_LINKS: Final = re.compile(r"(?i):(?=//)|(?<=mailto):|(?<=xmpp):|(?<=www)\.")
"""What makes a link out of text; like tags and mentions, it is neutralized."""


def as_markdown(document: Document) -> str:
    """Return the Markdown text."""
    lines = [f"# {_text(document.title)}: {_text(document.status)}", ""]
    lead, *more = document.lead or ("",)
    lines += [_text(lead), "", *(f"- {_text(each)}" for each in more), ""]
    lines += [*(f"- {_text(name)}: {_text(value)}" for name, value in document.figures), ""]
    for section in document.sections:
        lines += _section(section, 2)
    lines += ["", _text(document.made), ""]
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text)


def _section(section: Section, level: int) -> list[str]:
    lines = ["", f"{'#' * level} {_words(section.title)}", ""]
    for block in section.blocks:
        lines += [*_block(block), ""]
    for part in section.parts:
        lines += _section(part, level + 1)
    return lines


def _block(block: Block) -> list[str]:
    if isinstance(block, Paragraph):
        return [_text(block.text)]
    if isinstance(block, Items):
        return [f"- {_text(each)}" for each in block.texts]
    if isinstance(block, Facts):
        return [f"- {_text(name)}: {_text(value)}" for name, value in block.pairs]
    if isinstance(block, Chart):
        said = f"{_text(block.title)}: {_text(block.summary)}"
        return [said, *(["", *_table(block.table)] if block.table is not None else [])]
    return _table(block)


def _table(table: Table) -> list[str]:
    return [
        f"{_text(table.caption)}:",
        "",
        f"| {' | '.join(_text(column.title) or '.' for column in table.columns)} |",
        f"|{'|'.join('---:' if column.number else '---' for column in table.columns)}|",
        *(f"| {' | '.join(_text(cell) or '.' for cell in row)} |" for row in table.rows),
    ]


def _text(text: str) -> str:
    """Escape untrusted text, also for the beginning of a line."""
    shown = _words(text)
    return _AT_FIRST.sub("&#8203;" if shown[:1].isdecimal() else "\\\\", shown)


def _words(text: str) -> str:
    """Escape untrusted text: no markup, no HTML, no links, one line; not for the beginning of a line."""
    cut = text if len(text) <= _LONGEST_CELL else text[:_LONGEST_CELL] + "..."
    shown = "".join(_HTML.get(each, each) for each in _SPECIAL.sub(r"\\\1", inert(cut).strip()))
    return _LINKS.sub(lambda found: f"&#{ord(found[0])};", shown)
