"""Renders a frame: lines from a view and the user's choices. Pure: the same view and look give the same lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from gpulaunch.exporters.tui.cells import Line, clip, line, plain, seconds, text_of, took, wrap
from gpulaunch.exporters.tui.header import header, keys, tabs
from gpulaunch.exporters.tui.history import history_page
from gpulaunch.exporters.tui.look import Body, Look, Page
from gpulaunch.exporters.tui.one import log_page, output_page, rank_page
from gpulaunch.exporters.tui.pages import copies_page, costs, findings_page, input_page, memory_page, where
from gpulaunch.exporters.tui.ranks import ranks_page
from gpulaunch.exporters.view.model import RunView

_NARROWEST: Final = 40
_LOWEST: Final = 10
_HEADLINES: Final = 3
"""Number of findings below the table of ranks."""
_EVENTS_ONCE: Final = 20

HELP: Final = """\
1-8, tab         ranks, findings, input, copies, memory, history, one rank, log
up, down, j, k   the rank above, below; lines, where there is no table of ranks
pgup, pgdn       a screen up, down; home, end (g, G): the first, the last
enter            everything about the selected rank
l                its log;  e: stdout or stderr;  [ ]: attempt before, after
s, S             sort ranks by the next column;  r: the other way round
/                filter ranks: 3, 8-15, n1 (node 1), ! (marked); empty: all
w                curves of the whole run, the last 10 minutes, the last one
d                the stack of the selected rank, now (it is not stopped)
t, T             trace the selected rank, all of this node: gpulaunch trace
9                what the last dump or trace said
esc              back to the ranks;  q: quit

Bars:   D data_wait  H h2d  F forward  B backward  C comm  O optimizer  S sync
        K checkpoint  M compile  G gc  V validation  . other
Marks:  late: the others wait for it (finding `straggler`)
        still 40s: no step for so long;  off: nothing is measured in it
A dash is not known, and not 0. Times with + are since the run began."""


def frame(view: RunView | None, look: Look, width: int, height: int) -> list[Line]:
    """Return exactly `height` lines of at most `width` cells."""
    if width < _NARROWEST or height < _LOWEST:
        small = f"{width}x{height} is too small: {_NARROWEST}x{_LOWEST} at least"
        return _filled([clip(line(small), width)], height)
    if view is None:
        told = look.trouble or (
            f"the disk has not answered for {took(look.stale_seconds)}" if look.stale_seconds else "reading the run"
        )
        return [*_filled([line((each, "dim")) for each in wrap(plain(told), width)], height - 1), keys(look, width)]
    if look.page is Page.HELP:
        return [*_filled([clip(line(each), width) for each in HELP.splitlines()], height - 1), keys(look, width)]
    top = [*header(view, look, width), tabs(view, look, width)]
    body = body_of(view, look, width)
    room = height - len(top) - 1
    below = list(body.tail)
    if look.page is Page.RANKS:
        spare = max(0, room - len(body.head) - 6)
        below += headlines(view, width, min(_HEADLINES, spare))
        if not view.ranks:
            below += [line((each, "warn")) for note in view.notes for each in wrap(plain(note), width, indent="  ")]
    middle = _middle(body, look, room - len(below))
    lines = [*top, *_filled([*middle, *below], room), keys(look, width)]
    return [clip(each, width) for each in lines]


def body_of(view: RunView, look: Look, width: int) -> Body:
    """Return the open page."""
    match look.page:
        case Page.FINDINGS:
            return findings_page(view, width)
        case Page.INPUT:
            return input_page(view, look, width)
        case Page.COPIES:
            return copies_page(view, look, width)
        case Page.MEMORY:
            return memory_page(view, look, width)
        case Page.HISTORY:
            return history_page(view, width)
        case Page.RANK:
            return rank_page(view, look, width)
        case Page.LOG:
            return log_page(view, look, width)
        case Page.OUTPUT:
            return output_page(look, width)
        case Page.RANKS | Page.HELP:
            return ranks_page(view, look, width)


def scrolled(view: RunView, look: Look, width: int, height: int) -> int:
    """Return how far the page can be scrolled at most."""
    body = body_of(view, look, width)
    room = height - len(header(view, look, width)) - 2 - len(body.head) - len(body.tail)
    return max(0, len(body.rows) - max(1, room))


def headlines(view: RunView, width: int, most: int) -> list[Line]:
    """Return the most expensive findings, one line each."""
    findings = [finding for finding in view.findings if finding.active]
    if not findings or most < 1:
        return []
    lines = [
        clip(
            line(
                (f"{plain(each.rule)}{where(each)}", "strong"),
                f": {seconds(each.lost_seconds) + ' lost' if each.lost_seconds else costs(each)}; ",
                (plain(each.advice), "good"),
            ),
            width,
        )
        for each in findings[:most]
    ]
    more = len(findings) - len(lines)
    title = "to change" + (f" ({more} more: key 2)" if more else "")
    return [line((title, "title")), *lines]


def _middle(body: Body, look: Look, room: int) -> list[Line]:
    """Return the visible part of a page."""
    head = list(body.head)
    if len(head) > room // 2:  # the last line of it is the title of the table
        head = [*head[: max(0, room // 2 - 2)], line(("...", "dim")), head[-1]]
    room = max(1, room - len(head))
    most = max(0, len(body.rows) - room)
    if body.focus is not None:
        first = max(0, min(body.focus - room // 2, most))
    elif body.follow:
        first = most - min(look.top, most)
    else:
        first = min(look.top, most)
    rows = list(body.rows[first : first + room])
    if first and rows and not body.follow and body.focus is None:
        rows[0] = line((f"... {first + 1} lines above", "dim"))
    if first < most and rows and body.focus is None:
        rows[-1] = line((f"... {len(body.rows) - first - len(rows) + 1} lines below", "dim"))
    return [*head, *rows]


def _filled(lines: list[Line], height: int) -> list[Line]:
    return [*lines[:height], *([()] * (height - len(lines)))]


def once(view: RunView, width: int, *, ascii_only: bool = False) -> str:
    """Return all pages, one below the other, as plain text."""
    look = Look(ascii_only=ascii_only, cursor=False)
    lines: list[Line] = [*header(view, look, width)]
    pages = [Page.RANKS, Page.FINDINGS, Page.INPUT, Page.COPIES, Page.MEMORY]
    for page in pages:
        if page is Page.MEMORY and not view.ranks and not view.nodes:
            continue
        if page in (Page.INPUT, Page.COPIES) and not view.ranks:
            continue
        body = body_of(view, replace(look, page=page), width)
        lines += [(), line(f"== {page.value}"), *body.head, *body.rows, *body.tail]
    history = history_page(view, width, most_events=_EVENTS_ONCE)
    lines += [(), line(f"== {Page.HISTORY.value}"), *history.rows]
    return "".join(f"{text_of(clip(each, width)).rstrip()}\n" for each in lines)
