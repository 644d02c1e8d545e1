"""Which fault moves which panel: one table for all dashboards, and how it is measured. Not a test module.

A panel is held against its picture of the scene `healthy`. One that moves past a limit was well within it there; one
that goes up or down does so by more than chance; of a table other rows are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from exprs import Query, dashboards, panels, queries
from many_ranks import LEFT, SLOW
from scene import Album, Answer
from sidecar_with_gpus import ILL

MIB = 1 << 20
SLOW_RANK = {"real": "1", "many": str(SLOW)}
THE_SLOW_ONE = "the slow one"
"""Its number depends on the run."""


@dataclass(frozen=True)
class Panel:
    """A panel that shows something."""

    dashboard: str
    title: str
    kind: str

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.title} ({self.kind})"


@dataclass(frozen=True, kw_only=True)
class Move:
    """What a panel does in a scene: it goes `past` its limit, `up` or `down`, or (a table) shows other `rows`."""

    scene: str
    way: str
    legend: str | None = None
    """Of one of its queries; None: of all together."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the series that move."""
    times: float = 1.5
    by: float = 0.0
    """Up: to more than so many times as much and this. Down: to less than what was by so many, without this."""
    real: bool = False
    """In the real run, too."""
    also: str = ""
    """An earlier scene in which it may be past its limit already."""
    why: str = ""
    """Why its limit is not what it moves past, where it has one."""

    def of(self, run: str) -> Move:
        """With the labels as they are in a run."""
        return replace(
            self,
            labels={name: SLOW_RANK[run] if value == THE_SLOW_ONE else value for name, value in self.labels.items()},
        )

    def missing(self, panel: Panel, before: Album, after: Album) -> str:
        """What is not as it should be; empty if it moves."""
        if panel.kind == "table":
            rows = [_rows(album, panel) for album in (before, after)]
            return "" if rows[0] != rows[1] else f"{len(rows[1])} rows as before"
        amounts = [[value for _, value in self.series(panel, album)] for album in (before, after)]
        if self.way == "past":
            past = [any(is_past(panel, value) for value in values) for values in amounts]
            return "" if past == [False, True] else f"past its limit before and then: {past}, {amounts}"
        first, then = (sum(values) for values in amounts)
        moved = then > self.times * first + self.by if self.way == "up" else then < first / self.times - self.by
        return "" if moved else f"from {first:.6g} to {then:.6g} is not {self.way}"

    def series(self, panel: Panel, album: Album) -> Iterator[tuple[Mapping[str, str], float]]:
        """The last value of each series that is meant."""
        for query, answer in _answers(album, panel):
            if self.legend in (None, query.legend):
                for labels, values in answer.series:
                    if self.labels.items() <= labels.items():
                        yield labels, values[-1]


def _answers(album: Album, panel: Panel) -> Iterator[tuple[Query, Answer]]:
    for query, answer in album.answers.items():
        if (query.dashboard, query.panel, query.kind) == (panel.dashboard, panel.title, panel.kind):
            yield query, answer


def _rows(album: Album, panel: Panel) -> set[tuple[str, ...]]:
    """What a table shows."""
    return {
        tuple(str(values[-1]) if column == "Value" else labels.get(column, "") for column in query.columns)
        for query, answer in _answers(album, panel)
        for labels, values in answer.series
    }


# --- limits ----------------------------------------------------------------------------------------------------------


def is_past(panel: Panel, value: float) -> bool:
    """Whether a value is past a limit of its panel: in no green."""
    color: str = [step["color"] for step in _steps(panel) if step["value"] is None or step["value"] <= value][-1]
    return color != "green"


def limited(panel: Panel) -> bool:
    """Whether it has a limit that a value can be past; of a table every row is one to look at."""
    return panel.kind != "table" and len(_steps(panel)) > 1


@cache
def _steps(panel: Panel) -> list[dict[str, Any]]:
    (steps,) = (
        each["fieldConfig"]["defaults"]["thresholds"]["steps"]
        for each, _ in panels(dashboards()[f"gpulaunch-{panel.dashboard}.json"])
        if (each["title"], each["type"]) == (panel.title, panel.kind)
    )
    return list(steps)


# --- the table -------------------------------------------------------------------------------------------------------


def past(scene: str, legend: str | None = None, *, also: str = "", real: bool = False, **labels: str) -> Move:
    return Move(scene=scene, way="past", legend=legend, labels=labels, also=also, real=real)


def up(scene: str, legend: str | None = None, *, times: float = 1.5, by: float = 0.0, **more: Any) -> Move:
    return _to("up", scene, legend, times, by, **more)


def down(scene: str, legend: str | None = None, *, times: float = 1.5, by: float = 0.0, **more: Any) -> Move:
    return _to("down", scene, legend, times, by, **more)


def _to(way: str, scene: str, legend: str | None, times: float, by: float, **more: Any) -> Move:
    own = {name: more.pop(name) for name in ("real", "why") if name in more}
    return Move(scene=scene, way=way, legend=legend, labels=more, times=times, by=by, **own)


def rows(scene: str, *, real: bool = False) -> Move:
    return Move(scene=scene, way="rows", real=real)


ONE = {"times": 1.0}
SCENES = HEALTHY, DATA, RANK, AGAIN, TROUBLE = "healthy", "slow-loader", "slow-rank", "restarted", "trouble"
"""In the order of the story."""
CARD = {"gpu": str(ILL)}
NOT_IN_STEP = "the made-up ranks keep no step: some are always ahead"
A_MINUTE = "it is a minute, and a scene is shorter"
HALF_AN_HOUR = "it is half an hour, and a scene is shorter"
EIGHT_RANKS = "it is for 8 ranks on a node, and here are 64"
OF_THE_MACHINE = "64 ranks take long to look at where there are two cores, and longer where those are others', too"
SINCE_THE_BEGINNING = "it is of all that has crossed the link, which takes as long to change as it has run"
PAGEABLE = {"direction": "h2d", "host_memory": "pageable"}

_TABLE: dict[str, dict[str, Move | tuple[Move, ...]]] = {
    "overview": {
        "Ranks observed": down(TROUBLE, **ONE, by=0.5),
        "Longest since a step": up(TROUBLE, **ONE, by=15, why=A_MINUTE),
        "Restarts": past(AGAIN, real=True),
        "Hangs": past(TROUBLE),
        "Goodput": past(TROUBLE, also=AGAIN),
        "Asked to end": past(TROUBLE),
        "Steps per second": down(DATA, "slowest rank", times=1.3, real=True),
        "Samples per second": down(DATA, times=1.3, real=True),
        "Step time": up(DATA, "mean", real=True),
        "Steps that did not count": past(TROUBLE),
        "Backward passes in a step": up(TROUBLE),
        "What a step is counted by": rows(TROUBLE),
        "Where the time of a step goes": up(DATA, **ONE, by=0.2, phase="data_wait", real=True),
        "What was found, and what it costs": past(RANK, rule="straggler"),
        "Waiting for data": (
            past(DATA, "worst rank"),
            past(DATA, "all ranks"),
            up(DATA, "worst rank", **ONE, by=0.2, real=True),
            up(DATA, "all ranks", **ONE, by=0.2, real=True),
        ),
        "Pauses": (past(TROUBLE, "garbage collection"), past(TROUBLE, "compilation")),
        "How often": (up(TROUBLE, "garbage collections"), up(TROUBLE, "compilations")),
        "Found now": rows(RANK),
        "GPU use": past(TROUBLE, "multiprocessors"),
        "Waiting for the GPU": (past(TROUBLE, "copies"), past(TROUBLE, "syncs")),
    },
    "ranks": {
        "Ranks with steps": down(TROUBLE, **ONE, by=0.5),
        "Longest own work": (past(RANK), up(RANK, **ONE, by=0.008, real=True)),
        "Of a step": (past(RANK), up(RANK, **ONE, by=0.05, real=True)),
        "Steps apart": up(TROUBLE, times=2, by=50, why=NOT_IN_STEP),
        "Inside of a collective": up(TROUBLE),
        "Own work in a step, by rank": up(RANK, **ONE, by=0.008, rank=THE_SLOW_ONE, real=True),
        "Where ranks meet: time in a step, by rank": up(RANK, **ONE, by=0.008, rank="0", real=True),
        "Step time by rank": up(RANK, **ONE, by=0.008, rank="0", real=True),
        "The five with most work of their own": (
            past(RANK, rank=THE_SLOW_ONE),
            up(RANK, **ONE, by=0.008, rank=THE_SLOW_ONE, real=True),
        ),
        "Why: the rank with most of each phase, above the median rank": (
            past(RANK, "forward"),
            up(RANK, "forward", **ONE, by=0.008, real=True),
        ),
        "Since the last step": up(TROUBLE, **ONE, by=15, rank=str(LEFT), why=A_MINUTE),
        "Steps behind": up(TROUBLE, times=2, by=50, rank=str(LEFT), why=NOT_IN_STEP),
        "Collectives behind": up(TROUBLE, times=2, by=100, rank=str(LEFT)),
        "Collectives not completed": up(TROUBLE),
        "In collective calls": up(RANK, "highest"),
        "Collective calls": down(DATA, "waited in", times=1.3),
        "Communication of DistributedDataParallel": (up(RANK, "all"), up(RANK, "exposed")),
        "The last collective of each rank": rows(TROUBLE),
        "Processes": rows(AGAIN, real=True),
        "Cores used": up(TROUBLE, "highest"),
        "Waiting for a core": past(TROUBLE),
        "Threads and cores": up(TROUBLE, "busy threads"),
    },
    "dataloader": {
        "Waiting for data": (past(DATA), up(DATA, **ONE, by=0.2, real=True)),
        "Batches ready": past(DATA),
        "Batches per second": down(DATA, times=1.3, real=True),
        "Size of a batch": up(TROUBLE),
        "Workers": down(TROUBLE),
        "Validation": up(TROUBLE),
        "Waiting for data, by rank": up(DATA, **ONE, by=0.2, rank="0", real=True),
        "How long a batch is waited for": up(DATA, "95 %", real=True),
        "Waits by what the queue showed": past(DATA, "all"),
        "Time of the workers, by what they do in fetches": up(DATA, state="blocked"),
        "Shares of that": up(DATA, "{{state}}", **ONE, by=0.1, state="blocked", real=True),
        "Read by workers": down(DATA, times=1.3),
        "Batches ready when one is asked for": past(DATA),
        "Batches asked of the workers": up(TROUBLE),
        "Batches that wait": (up(TROUBLE, "behind another"), up(TROUBLE, "to be pinned")),
    },
    "transfer": {
        "Pageable, of what went to the GPU": past(TROUBLE),
        "Standing still for copies": past(TROUBLE),
        "Standing still for syncs": past(TROUBLE),
        "Syncs in a step": past(TROUBLE),
        "Copied": up(TROUBLE, times=20, **PAGEABLE),
        "Copies": up(TROUBLE, **PAGEABLE),
        "Speed of copies": up(TROUBLE, **PAGEABLE),
        "Standing still for copies, by kind": up(TROUBLE, times=20, **PAGEABLE),
        "Syncs": up(TROUBLE, times=20, kind="item"),
        "Standing still for syncs, by kind": up(TROUBLE, times=20, kind="item"),
        "Standing still for syncs, by rank": past(TROUBLE, "highest"),
        "Across PCIe": up(TROUBLE, times=2, **CARD, direction="receive"),
        "Seen of it": down(TROUBLE, **CARD, direction="h2d", why=SINCE_THE_BEGINNING),
        "Width of the link, of what it could be": past(TROUBLE, "GPU {{gpu}} width", **CARD),
    },
    "memory": {
        "Memory of the nodes in use": past(TROUBLE),
        "Shared memory in use": past(TROUBLE),
        "Of the control group's limit": past(TROUBLE),
        "Swapped out": up(TROUBLE),
        "Ranks and their workers": up(TROUBLE, **ONE, by=150 * MIB, role="trainer"),
        "The five largest ranks": up(TROUBLE, times=3, rank=str(SLOW)),
        "By rank": up(TROUBLE, times=3, rank=str(SLOW)),
        "Nodes": down(TROUBLE, times=3, state="available"),
        "Control groups": up(TROUBLE, times=2, state="used"),
        "Shared memory": up(TROUBLE, "{{state}}", times=3, state="used"),
        "Pressure": past(TROUBLE),
        "torch's allocator": up(TROUBLE, times=3, state="inactive_split"),
        "Highest so far": (up(TROUBLE, "allocated"), up(TROUBLE, "reserved")),
        "Reserved and not usable": past(TROUBLE, "median"),
        "Trouble": (past(TROUBLE, "given back"), past(TROUBLE, "failed")),
        "Pinned": up(TROUBLE, times=3),
    },
    "gpus": {
        "Multiprocessors with work": down(TROUBLE, **CARD),
        "Utilization": past(TROUBLE, **CARD),
        "Pipes": down(TROUBLE, pipe="tensor"),
        "Occupancy": down(TROUBLE, **CARD),
        "Memory bandwidth": down(TROUBLE, **CARD),
        "Memory": past(TROUBLE, **CARD),
        "Where the time of a step goes on the GPU": up(TROUBLE, phase="forward"),
        "Clock": down(TROUBLE, **CARD),
        "Throttled": past(TROUBLE, reason="thermal"),
        "Temperature": past(TROUBLE, **CARD),
        "Power": down(TROUBLE, **CARD),
        "Energy of a step": up(TROUBLE, **ONE, by=60),
        "Across NVLink": up(TROUBLE, times=2, **CARD, direction="transmit"),
        "Memory errors": past(TROUBLE, **CARD, severity="uncorrected"),
        "Rows replaced": up(TROUBLE, **CARD, kind="uncorrectable"),
        "Rows not replaced": past(TROUBLE, "{{instance}} {{gpu}} wait", **CARD),
        "Packets sent again": past(TROUBLE, **CARD),
        "Critical errors": rows(TROUBLE),
    },
    "recovery": {
        "Goodput": past(TROUBLE, also=AGAIN),
        "Attempt": past(AGAIN, real=True),
        "Lost work": up(TROUBLE),
        "Hangs": (past(TROUBLE, "hangs"), past(TROUBLE, "told")),
        "A failure now would cost": up(TROUBLE, **ONE, by=15, why=HALF_AN_HOUR),
        "Asked to end": past(TROUBLE),
        "Where the time goes": up(TROUBLE, bucket="lost_work"),
        "Where the time has gone": up(AGAIN, bucket="restart", real=True),
        "Attempts": past(AGAIN, real=True),
        "Restarts by cause": past(AGAIN, real=True),
        "Newest": up(DATA, **ONE, real=True),
        "Went on from": up(AGAIN, real=True),
        "Failed saves": past(TROUBLE),
        "Standing still for saves": past(TROUBLE),
        "Checkpoints": up(TROUBLE, "failed"),
        "Written": down(TROUBLE),
        "Age of the newest": up(TROUBLE, **ONE, by=15, why=HALF_AN_HOUR),
        "Standing still for saves, by whose": (past(TROUBLE, "all"), past(TROUBLE, "gpulaunch.checkpoint")),
    },
    "cost": {
        "Inside of the ranks": past(TROUBLE),
        "Cores of the sidecars": up(TROUBLE, why=EIGHT_RANKS),
        "Memory of the sidecars": up(TROUBLE, **ONE, by=60 * MIB, why=EIGHT_RANKS),
        "Collectors out of service": past(TROUBLE),
        "Time inside the probe": past(TROUBLE, "highest"),
        "Steps not observed": up(TROUBLE),
        "Parts of the probe out of service": rows(TROUBLE),
        "Time of collecting": up(TROUBLE, times=3, collector="host"),
        "Errors of collectors": past(TROUBLE, collector="findings"),
        "Refreshes": up(TROUBLE, "too late", **ONE, by=0.05),
        "Time of a refresh": up(TROUBLE, "refresh", **ONE, by=1.0, why=OF_THE_MACHINE),
        "Stacks sampled": up(TROUBLE, phase="sync"),
    },
}
"""By dashboard and panel; both panels of one name move alike."""
MOVES: dict[tuple[str, str], tuple[Move, ...]] = {
    (dashboard, title): moves if isinstance(moves, tuple) else (moves,)
    for dashboard, titles in _TABLE.items()
    for title, moves in titles.items()
}
FACTS = {("overview", "The run"), ("gpus", "Cards"), ("cost", "Versions")}
"""Panels that tell what a run is: nothing that happens to it changes them."""


# --- what moves, and what does not -----------------------------------------------------------------------------------


@cache
def all_panels() -> dict[Panel, set[str]]:
    """Every panel but those of words, and the legends of its queries."""
    found: dict[Panel, set[str]] = {}
    for query in queries():
        found.setdefault(Panel(query.dashboard, query.panel, query.kind), set()).add(query.legend)
    return found


def unmoved(run: str, scene: str, before: Album, after: Album) -> list[str]:
    """Panels that do not show what has happened in a scene, and how."""
    return [
        f"{panel}, {move.legend or 'all'} {dict(move.labels)}: {missing}"
        for panel, move in moves_of(run)
        if move.scene == scene and (missing := move.missing(panel, before, after))
    ]


def past_already(run: str, scene: str, album: Album) -> list[str]:
    """Panels that are past their limits in a picture, although what they are about comes later in the story."""
    later = SCENES[SCENES.index(scene) + 1 :]
    return [
        f"{panel}, {move.legend or 'all'} {labels}: {value:.6g}"
        for panel, move in moves_of(run)
        if move.way == "past" and move.scene in later and move.also != scene and limited(panel)
        for labels, value in move.series(panel, album)
        if is_past(panel, value)
    ]


def moves_of(run: str) -> Iterator[tuple[Panel, Move]]:
    """What each panel does in the story of a run; of two panels of one name each has the moves of its legends."""
    for panel, legends in all_panels().items():
        for move in MOVES.get((panel.dashboard, panel.title), ()):
            if (run == "many" or move.real) and (move.legend is None or move.legend in legends):
                yield panel, move.of(run)
