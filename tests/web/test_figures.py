"""What the tables of the page show is what the run's JSON says: every figure, in its own place and unit.

The cells are read back: `1.5 GiB` is 1.5 * 2 ** 30, `2 min 5 s` is 125. So nothing here knows how the page writes.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
import scenes
from kept_run import WALL_S
from scenes import Scene, Served
from tab import Tab

from gpulaunch.exporters.view.as_json import from_json, to_json
from gpulaunch.exporters.view.model import RunView
from gpulaunch.exporters.web import live_documents

Serve = Callable[..., Served]
Look = Callable[..., Tab]
Stage = Callable[..., Scene]
View = dict[str, Any]

DASH = "-"
# By what is measured, as names say it: the units that a person reads it in. All else is counted, and has none.
UNITS = {
    "bytes": {"B": 1.0, **{f"{letter}iB": 1024.0**power for power, letter in enumerate("KMGT", 1)}},
    "seconds": {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "ratio": {"%": 0.01},
    "watts": {"W": 1.0},
    "celsius": {"C": 1.0},
    "hertz": {"Hz": 1.0, "kHz": 1e3, "MHz": 1e6, "GHz": 1e9},
}
DIGITS = 0.006
"""Three digits are shown."""

# Section and beginning of the caption of each table; title of a column, and where its value is in a row: several paths
# are joined by "of". "": computed, or in words.
COLUMNS: Mapping[tuple[str, str], Sequence[tuple[str, str]]] = {
    ("steps", "Progress by rank"): (
        ("Rank", "rank"),
        ("Steps", "steps"),
        ("Steps/s", "steps_per_second_now"),
        ("Step", "step_seconds_now"),
        ("Samples", "samples"),
        ("Last step", "last_step_s"),
        ("Step ends with", "step_source"),
    ),
    ("steps", "CPU time, garbage"): (
        ("Rank", "rank"),
        ("CPU, trainer", "cpu_seconds.trainer"),
        ("CPU, workers", "cpu_seconds.workers"),
        ("Garbage collections", "pauses.gc_collections"),
        ("GC time", "pauses.gc_seconds"),
        ("Compilations", "pauses.compiles"),
        ("Compile time", "pauses.compile_seconds"),
        ("Collectives", "pauses.comm_calls"),
        ("Time in them", "pauses.comm_blocked_seconds"),
    ),
    ("loader", "Dataloader by rank"): (
        ("Rank", "rank"),
        ("Batches", "loader.batches"),
        ("Bytes", "loader.batch_bytes"),
        ("Batch size", ""),
        ("Data wait", "loader.wait_seconds"),
        ("Wait per batch", ""),
        ("Transfer", "loader.transfer_seconds"),
        ("Out of order", "loader.reorder_blocked_seconds"),
        ("Ready", "loader.ready"),
        ("Workers", "loader.workers_alive of loader.workers_configured"),
        ("Preparing", "loader.worker_seconds.prep"),
        ("Waiting for a core", "loader.worker_seconds.contention"),
        ("Blocked", "loader.worker_seconds.blocked"),
        ("Read", "loader.storage_bytes"),
        ("Cached", "loader.cached_bytes"),
    ),
    ("copies", "Synchronization by line"): (
        ("Line", "text"),
        ("Kind", "kind"),
        ("Ranks", "ranks"),
        ("Times", "count"),
        ("Bytes", "size_bytes"),
        ("Blocked", "blocked_seconds"),
        ("On the GPU", "gpu_seconds"),
        ("Pinned", ""),
        ("non_blocking", ""),
    ),
    ("copies", "Copies by rank"): (
        ("Rank", "rank"),
        ("Direction", ""),
        ("Host memory", "host_memory"),
        ("Copies", "count"),
        ("Bytes", "size_bytes"),
        ("Blocked", "blocked_seconds"),
        ("On the GPU", "gpu_seconds"),
    ),
    ("copies", "Synchronization with the GPU by rank"): (
        ("Rank", "rank"),
        ("By", "kind"),
        ("Calls", "calls"),
        ("Blocked", "blocked_seconds"),
    ),
    ("memory", "Host memory by rank"): (
        ("Rank", "rank"),
        ("Trainer RSS", "memory.rss_bytes.trainer"),
        ("Workers RSS", "memory.rss_bytes.workers"),
        ("Trainer PSS", "memory.pss_bytes.trainer"),
        ("Workers PSS", "memory.pss_bytes.workers"),
        ("Batches in shm", "memory.shm_inflight_bytes"),
    ),
    ("memory", "GPU memory by rank"): (
        ("Rank", "rank"),
        ("Allocated", "memory.gpu_bytes.allocated"),
        ("Reserved", "memory.gpu_bytes.reserved"),
        ("Peak allocated", "most_bytes.allocated"),
        ("Peak reserved", "most_bytes.reserved"),
        ("Pinned host memory", "memory.pinned_bytes"),
        ("Retries", "memory.alloc_retries"),
        ("OOMs", "memory.ooms"),
    ),
    ("memory", "Memory by node"): (
        ("Node", "name"),
        ("Total", "values.memory_total_bytes"),
        ("Available", "values.memory_available_bytes"),
        ("Page cache", "values.page_cache_bytes"),
        ("cgroup limit", "values.cgroup_limit_bytes"),
        ("cgroup used", "values.cgroup_used_bytes"),
        ("Swap used", "values.swap_used_bytes"),
        ("shm size", "values.shm_size_bytes"),
        ("shm used", "values.shm_used_bytes"),
    ),
    ("gpus", "GPUs (node:index)"): (
        ("GPU", "name"),
        ("Model", "model"),
        ("Utilization", "values.utilization_ratio"),
        ("SMs active", "values.sm_active_ratio"),
        ("Memory", "values.memory_used_bytes of values.memory_total_bytes"),
        ("Power", "values.power_watts"),
        ("Temperature", "values.temperature_celsius"),
        ("Clock", "values.clock_hertz"),
        ("Energy (J)", "values.energy_joules"),
        ("ECC, uncorrected", "values.ecc_uncorrected"),
        ("Xid errors", "values.xid_errors"),
        ("Throttled", "throttle_seconds"),
    ),
    ("cost", "Probe overhead by rank"): (
        ("Rank", "rank"),
        ("Probe time", "cost.probe_seconds"),
        ("Share of steps", ""),
        ("Budget", "cost.budget_ratio"),
        ("Unobserved steps", "cost.unobserved_steps"),
        ("Parts unavailable", ""),
    ),
}
# A table with a column for each name that there is.
PHASES = ("steps", "Time in each phase by rank")
# A table with a row for each name that there is.
BUCKETS = ("goodput", "Time of the run")
TABLES = (*COLUMNS, PHASES)
IN_WORDS = ("", "rank", "text", "kind", "ranks", "direction", "host_memory", "name", "model", "step_source")
"""What is no figure."""


def rows_of(view: View, table: tuple[str, str]) -> list[View]:
    """What a table has a row for."""
    each_rank: Sequence[View] = view["ranks"]
    if table == ("gpus", "GPUs (node:index)"):
        return [{**device, "name": f"{device['node']}:{device['gpu']}"} for device in view["devices"]]
    if table == ("copies", "Synchronization by line"):
        return list(view["sites"])
    if table == ("copies", "Copies by rank"):
        return [{"rank": rank["rank"], **copied} for rank in each_rank for copied in rank["copies"]]
    if table == ("copies", "Synchronization with the GPU by rank"):
        return [{"rank": rank["rank"], **sync} for rank in each_rank for sync in rank["syncs"]]
    if table == ("memory", "Memory by node"):
        return [{**node, "name": f"{node['node']}: {node['host']}"} for node in view["nodes"]]
    return list(each_rank)


def columns_of(view: View, table: tuple[str, str]) -> list[tuple[str, str]]:
    if table in COLUMNS:
        return list(COLUMNS[table])
    names = {name: None for row in rows_of(view, table) for name, value in row["phase_seconds"].items() if value}
    return [("Rank", "rank"), *((name.replace("_", " "), f"phase_seconds.{name}") for name in names)]


def value_of(row: Any, path: str) -> Any:
    for name in path.split("."):
        row = row.get(name) if row is not None else None
    return row


def shows(cell: str, value: Any, path: str) -> bool:
    """Whether this is how a person reads this value."""
    if value is None or value in ("", {}):
        return cell == DASH
    if not value and path in ("size_bytes", "gpu_seconds") and cell == DASH:
        return True  # a wait has none
    if isinstance(value, str):
        return cell in (value, value.replace("_", " "))
    if isinstance(value, list):
        return cell == ", ".join(map(str, value))
    if isinstance(value, dict):
        told = dict(each.split(" ", 1) for each in cell.split(", "))
        return told.keys() == value.keys() and all(shows(told[name], value[name], path) for name in value)
    if path.endswith("_s"):
        return cell == f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} UTC"
    amount = read(cell, next((units for kind, units in UNITS.items() if kind in path), {}))
    rounded = DIGITS if cell.endswith("%") else 0.5 if " min " in cell else 0.0
    return amount is not None and abs(amount - value) <= DIGITS * abs(value) + rounded


def read(cell: str, units: Mapping[str, float]) -> float | None:
    """`12 min 05 s` as 725; None: it is no amount, or not one in these units."""
    words = cell.replace(",", "").split(" ")
    try:
        if not units:
            return float(*words)
        return sum(float(count) * units[unit] for count, unit in zip(words[::2], words[1::2], strict=True))
    except (KeyError, TypeError, ValueError):
        return None


def cells_of(page: Any, table: tuple[str, str]) -> list[list[str]]:
    section, caption = table
    found: list[list[str]] = page.eval_on_selector_all(
        f"#{section} table",
        """(tables, caption) => tables.filter((table) => !table.closest("figure") &&
            table.caption.textContent.startsWith(caption)).flatMap(
            (table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent)))""",
        caption,
    )
    return found


def differences(page: Any, view: View) -> Iterator[tuple[str, str, str]]:
    """Where the page shows something else: table, column, and what is wrong there."""
    for table in TABLES:
        shown = cells_of(page, table) or [[]]
        columns, rows = columns_of(view, table), rows_of(view, table)
        if table == PHASES:  # in which order is the page's affair
            order = {title: at for at, title in enumerate(shown[0])}
            columns.sort(key=lambda column: order.get(column[0], len(order)))
        titles = [title for title, _ in columns]
        if shown[0] != titles or len(shown) - 1 != len(rows):
            yield table[1], "", f"{len(shown) - 1} rows of {shown[0]}, not {len(rows)} of {titles}"
            continue
        for cells, row in zip(shown[1:], rows, strict=True):
            for cell, (title, path) in zip(cells, columns, strict=True):
                if not path:
                    continue
                paths = path.split(" of ")
                values = [value_of(row, each) for each in paths]
                parts = cell.split(" of ") if len(paths) > 1 else [cell]
                if len(parts) != len(paths) or not all(map(shows, parts, values, paths)):
                    yield table[1], title, f"{cell!r}, not {values}"
    for name, spent in view["goodput_seconds"].items():
        told = {row[0]: row[1] for row in cells_of(page, BUCKETS)}
        if not shows(told.get(name.replace("_", " "), ""), spent, "goodput_seconds"):
            yield BUCKETS[1], name, f"{told}, not {spent}"


class Figures:
    """Values of which no two are alike."""

    def __init__(self, first: int) -> None:
        self._number = first

    def __call__(self, name: str) -> float:
        self._number += 1
        if "ratio" in name:
            return 0.101 + 0.0137 * (self._number % 60)
        size = 1.05**self._number
        return size / 100 if "second" in name else round(1000 * size)

    def fill(self, told: View, *names: str, of: str = "") -> None:
        """Change all figures of an object, and give it those of these names that it lacks."""
        for name in {**told, **dict.fromkeys(names)}:
            if told.get(name) is None or (isinstance(told[name], (int, float)) and not isinstance(told[name], bool)):
                told[name] = self(of or name)


def spread(view: View, first: int = 0) -> View:
    """The same run with another value in each place that a table shows: one in another's place would be seen."""
    view = copy.deepcopy(view)
    figures = Figures(first)
    for rank in view["ranks"]:
        for name in ("steps", "samples", "steps_per_second_now", "step_seconds_now"):
            rank[name] = figures(name)
        rank["last_step_s"] = WALL_S + 61 * (rank["rank"] + first + 1)
        figures.fill(rank["phase_seconds"], of="seconds")
        figures.fill(rank["loader"])
        figures.fill(rank["loader"]["worker_seconds"], "prep", "contention", "blocked", of="seconds")
        figures.fill(rank["memory"])
        figures.fill(rank["memory"]["rss_bytes"], "trainer", "workers")
        figures.fill(rank["memory"]["pss_bytes"], "trainer", "workers")
        figures.fill(rank["memory"]["gpu_bytes"])
        figures.fill(rank["most_bytes"], "allocated", "reserved", of="bytes")
        figures.fill(rank["cpu_seconds"], "trainer", "workers", of="seconds")
        figures.fill(rank["pauses"])
        figures.fill(rank["cost"], "budget_ratio")
        for each in (*rank["copies"], *rank["syncs"]):
            figures.fill(each)
    for site in view["sites"]:
        figures.fill(site)
    for node in view["nodes"]:
        figures.fill(node["values"], *(path.split(".")[1] for _, path in COLUMNS["memory", "Memory by node"][1:]))
    for device in view["devices"]:
        of_values = [
            name for _, path in COLUMNS["gpus", "GPUs (node:index)"] for name in re.findall(r"values\.(\w+)", path)
        ]
        figures.fill(device["values"], *of_values)
        figures.fill(device["throttle_seconds"], "thermal", of="seconds")
    figures.fill(view["goodput_seconds"], of="seconds")
    return view


@pytest.mark.parametrize("change", [copy.deepcopy, spread], ids=["as it is", "with no two figures alike"])
def test_every_figure_of_a_table_is_the_one_of_the_run(
    serve: Serve, look: Look, stage: Stage, change: Callable[[View], View], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with GPUs that goes on. And the other way round: of a run with other figures, each would be found wrong."""
    told: list[View] = []
    make = live_documents.view_of_state

    def changed(*args: Any, **how: Any) -> RunView:
        told.append(change(json.loads(json.dumps(to_json(make(*args, **how))))))
        return from_json(told[-1])

    monkeypatch.setattr(live_documents, "view_of_state", changed)
    tab = look(serve(stage(scenes.live)).url)
    tab.open()
    page = tab.until("live")
    view = told[-1]

    assert {table: len(rows_of(view, table)) for table in COLUMNS if not rows_of(view, table)} == {}
    assert list(differences(page, view)) == []

    if change is spread:
        wrong = spread(view, 200)
        figures = {
            (table[1], title) for table in TABLES for title, path in columns_of(wrong, table) if path not in IN_WORDS
        }
        figures |= {(BUCKETS[1], name) for name in wrong["goodput_seconds"]}
        assert {(table, title) for table, title, _ in differences(page, wrong)} == figures
        missing = {**view, "ranks": view["ranks"][:1], "devices": [], "sites": [], "nodes": []}
        assert {table for table, _, _ in differences(page, missing)} == {table[1] for table in TABLES}
