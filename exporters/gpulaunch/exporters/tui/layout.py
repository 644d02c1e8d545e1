"""What is on the screen: the tabs, the keys with their help, and the style sheet."""

from __future__ import annotations

from typing import Final

from textual.binding import Binding, BindingType

from gpulaunch.exporters.tui.pages import PAGES

TABS: Final = (*(page.name for page in PAGES), "log", "output")
"""In the order of their keys, from 1."""

BINDINGS: Final[list[BindingType]] = [
    Binding("question_mark,f1", "page('help')", "help", key_display="?"),
    Binding("q", "quit", "quit"),
    Binding("ctrl+c,ctrl+q", "quit", "quit", priority=True, show=False),
    *(Binding(str(number), f"page('{name}')", show=False) for number, name in enumerate(TABS, 1)),
    Binding("tab", "turn(1)", priority=True, show=False),
    Binding("shift+tab", "turn(-1)", priority=True, show=False),
    Binding("escape", "leave", priority=True, show=False),
    Binding("s", "sort(1)", show=False),
    Binding("S", "sort(-1)", show=False),
    Binding("r", "reverse", show=False),
    Binding("slash", "filter", show=False),
    Binding("enter", "page('rank')", show=False),
    Binding("l", "page('log')", "log"),
    Binding("e", "stream", show=False),
    Binding("left_square_bracket", "attempt(-1)", show=False),
    Binding("right_square_bracket", "attempt(1)", show=False),
    Binding("d", "dump", "stack"),
    Binding("t", "trace(False)", "trace"),
    Binding("T", "trace(True)", show=False),
    Binding("w", "window", "curves"),
]

HELP: Final = """\
1-8, tab         ranks, findings, input, copies, memory, history, one rank, log
up, down, j, k   the rank above, below; lines, where there is no table of ranks
left, right      the rest of a table that is wider than the screen
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
A dash means unknown, not 0. Times with + are since the start of the run."""

CSS: Final = """
VerticalScroll, RankTable, Log { scrollbar-size: 1 1; }
#summary { height: auto; max-height: 50%; }
TabbedContent { height: 1fr; }
Tabs { height: 1; }
Underline { display: none; }
Tab.-active { text-style: reverse bold; }
TabPane { padding: 0; height: 1fr; }
ContentSwitcher { height: 1fr; }
.above, .below { height: auto; }
.head { height: auto; max-height: 50%; }
RankTable, Log { height: 1fr; background: transparent; }
RankTable { min-height: 3; }
RankTable > .datatable--header { text-style: bold underline; background: transparent; }
RankTable > .datatable--cursor, RankTable:focus > .datatable--cursor {
    text-style: reverse; background: transparent; color: ansi_default;
}
.-low .below { display: none; }
#filter { height: 1; border: none; padding: 0; display: none; }
#filter.asked { display: block; }
Toast { width: auto; max-width: 100%; border: none; padding: 0 1; color: ansi_yellow; }
.-ascii VerticalScroll, .-ascii RankTable, .-ascii Log { scrollbar-size: 0 0; }
"""
