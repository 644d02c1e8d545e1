"""What the tables of the page show is what the run's JSON says: every figure, in its own place and unit.

The cells are read back: `1.5 GiB` is 1.5 * 2 ** 30, `2 min 5 s` is 125. So nothing here knows how the page writes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
import scenes
from kept_run import WALL_S
from scenes import Scene, Served
from tab import Tab

Serve = Callable[..., Served]
Look = Callable[..., Tab]
Stage = Callable[..., Scene]
View = dict[str, Any]

DASH = "\u2013"
# By what is measured, as names say it: the units that a person reads it in. All else is counted, and has none.
UNITS = {
    "bytes": {"B": 1.0, **{f"{letter}iB": 1024.0**power for power, letter in enumerate("KMGT", 1)}},
    "seconds": {"\u00b5s": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "ratio": {"%": 0.01},
    "watts": {"W": 1.0},
    "celsius": {"\u00b0C": 1.0},
    "hertz": {"MHz": 1e6},
}
DIGITS = 0.006
"""Three digits are shown."""

# Title of a column, and where its value is in a row: several paths are joined by "of".
COLUMNS: Mapping[str, Sequence[tuple[str, str]]] = {
    "#steps [data-part=ranks]": (
        ("Rank", "rank"),
        ("Steps", "steps"),
        ("A second", "steps_per_second_now"),
        ("A step takes", "step_seconds_now"),
        ("Samples", "samples"),
        ("Last step", "last_step_s"),
        ("Ends with", "step_source"),
    ),
    "#loader [data-part=ranks]": (
        ("Rank", "rank"),
        ("Batches", "loader.batches"),
        ("Waited", "loader.wait_seconds"),
        ("of it in transfer", "loader.transfer_seconds"),
        ("of it out of order", "loader.reorder_blocked_seconds"),
        ("Ready", "loader.ready"),
        ("Workers", "loader.workers_alive of loader.workers_configured"),
        ("Bytes", "loader.batch_bytes"),
    ),
    "#copies [data-part=sites]": (
        ("Line", "text"),
        ("What", "kind"),
        ("Ranks", "ranks"),
        ("Times", "count"),
        ("Bytes", "size_bytes"),
        ("Blocked", "blocked_seconds"),
        ("On the GPU", "gpu_seconds"),
        ("Pinned", "pinned of count"),
    ),
    "#copies [data-part=totals]": (
        ("Rank", "rank"),
        ("Direction", "direction"),
        ("Host memory", "host_memory"),
        ("Times", "count"),
        ("Bytes", "size_bytes"),
        ("Blocked", "blocked_seconds"),
        ("On the GPU", "gpu_seconds"),
    ),
    "#copies [data-part=waits]": (
        ("Rank", "rank"),
        ("By", "kind"),
        ("Times", "calls"),
        ("Blocked", "blocked_seconds"),
    ),
    "#memory [data-part=ranks]": (
        ("Rank", "rank"),
        ("Trainer", "memory.rss_bytes.trainer"),
        ("Workers", "memory.rss_bytes.workers"),
        ("In shared memory", "memory.shm_inflight_bytes"),
        ("GPU allocated", "memory.gpu_bytes.allocated"),
        ("GPU reserved", "memory.gpu_bytes.reserved"),
        ("GPU peak", "memory.gpu_bytes.peak_allocated"),
        ("Pinned", "memory.pinned_bytes"),
        ("Retries", "memory.alloc_retries"),
        ("Out of memory", "memory.ooms"),
    ),
    "#memory [data-part=nodes]": (
        ("Node", "name"),
        ("Memory available", "values.memory_available_bytes"),
        ("of", "values.memory_total_bytes"),
        ("Page cache", "values.page_cache_bytes"),
        ("Swap used", "values.swap_used_bytes"),
        ("/dev/shm used", "values.shm_used_bytes"),
        ("of", "values.shm_size_bytes"),
        ("cgroup used", "values.cgroup_used_bytes"),
        ("of", "values.cgroup_limit_bytes"),
    ),
    "#devices [data-part=now]": (
        ("GPU", "gpu"),
        ("Model", "model"),
        ("Utilization", "values.utilization_ratio"),
        ("SMs busy", "values.sm_active_ratio"),
        ("Memory", "values.memory_used_bytes"),
        ("of", "values.memory_total_bytes"),
        ("Power", "values.power_watts"),
        ("Temperature", "values.temperature_celsius"),
        ("Clock", "values.clock_hertz"),
        ("ECC, uncorrected", "values.ecc_uncorrected"),
        ("XID", "values.xid_errors"),
        ("Throttled", "throttle_seconds"),
    ),
}
# Tables with a column for each name that there is.
NAMED = {
    "#phases [data-part=totals]": ("Rank", "rank", "phase_seconds"),
    "#loader [data-part=workers]": ("Rank", "rank", "loader.worker_seconds"),
    "#history [data-part=buckets]": ("", "title", "goodput_seconds"),
}
IN_WORDS = ("rank", "text", "kind", "ranks", "direction", "host_memory", "name", "gpu", "model", "step_source", "title")
"""What is no figure."""


def rows_of(view: View, table: str) -> list[View]:
    """What a table has a row for."""
    each_rank: Sequence[View] = view["ranks"]
    if table.startswith("#history"):
        return [{"title": "the run", "goodput_seconds": view["goodput_seconds"]}]
    if table.startswith("#devices"):
        return list(view["devices"])
    if table == "#copies [data-part=sites]":
        return list(view["sites"])
    if table == "#copies [data-part=totals]":
        return [{"rank": rank["rank"], **copied} for rank in each_rank for copied in rank["copies"]]
    if table == "#copies [data-part=waits]":
        return [{"rank": rank["rank"], **sync} for rank in each_rank for sync in rank["syncs"]]
    if table == "#memory [data-part=nodes]":
        return [{**node, "name": f"{node['host']} ({node['node']})"} for node in view["nodes"]]
    return list(each_rank)


def columns_of(view: View, table: str) -> list[tuple[str, str]]:
    if table in COLUMNS:
        return list(COLUMNS[table])
    title, first, path = NAMED[table]
    names = {name: None for row in rows_of(view, table) for name, value in value_of(row, path).items() if value}
    return [(title, first), *((name.replace("_", " "), f"{path}.{name}") for name in names)]


def value_of(row: Any, path: str) -> Any:
    for name in path.split("."):
        row = row.get(name) if row is not None else None
    return row


def shows(cell: str, value: Any, path: str) -> bool:
    """Whether this is how a person reads this value."""
    if value is None or value in ("", {}):
        return cell == DASH
    if isinstance(value, str):
        return cell in (value, value.replace("_", " "))
    if isinstance(value, list):
        return cell == f"{min(value)}-{max(value)}"
    if isinstance(value, dict):
        told = dict(each.split(" ", 1) for each in cell.split(", "))
        return told.keys() == value.keys() and all(shows(told[name], value[name], path) for name in value)
    if path.endswith("_s"):
        return cell == f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S}"
    amount = read(cell, next((units for kind, units in UNITS.items() if kind in path), {}))
    return amount is not None and abs(amount - value) <= DIGITS * abs(value) + (DIGITS if cell.endswith("%") else 0.0)


def read(cell: str, units: Mapping[str, float]) -> float | None:
    """`12 min 5 s` as 725; None: it is no amount, or not one in these units."""
    words = cell.replace(",", "").split(" ")
    try:
        if not units:
            return float(*words)
        return sum(float(count) * units[unit] for count, unit in zip(words[::2], words[1::2], strict=True))
    except (KeyError, TypeError, ValueError):
        return None


def differences(page: Any, view: View) -> Iterator[tuple[str, str, str]]:
    """Where the page shows something else: table, column, and what is wrong there."""
    for table in (*COLUMNS, *NAMED):
        shown = page.eval_on_selector(
            f"{table} table",
            "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))",
        )
        columns, rows = columns_of(view, table), rows_of(view, table)
        if table in NAMED:  # in which order is the page's affair; and without a name there is no table
            place = {title: at for at, title in enumerate(shown[0])}
            columns.sort(key=lambda column: place.get(column[0], len(place)))
            rows = rows if len(columns) > 1 else []
        titles = [title for title, _ in columns]
        if shown[0] != titles or len(shown) - 1 != len(rows):
            yield table, "", f"{len(shown) - 1} rows of {shown[0]}, not {len(rows)} of {titles}"
            continue
        for cells, row in zip(shown[1:], rows, strict=True):
            for cell, (title, path) in zip(cells, columns, strict=True):
                paths = path.split(" of ")
                values = [value_of(row, each) for each in paths]
                parts = cell.split(" of ") if len(paths) > 1 else [cell]
                if len(parts) != len(paths) or not all(map(shows, parts, values, paths)):
                    yield table, title, f"{cell!r}, not {values}"


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
        figures.fill(rank["memory"]["gpu_bytes"])
        for each in (*rank["copies"], *rank["syncs"]):
            figures.fill(each)
    for site in view["sites"]:
        figures.fill(site)
    for node in view["nodes"]:
        figures.fill(node["values"], *(path.split(".")[1] for _, path in COLUMNS["#memory [data-part=nodes]"][1:]))
    for device in view["devices"]:
        of_values = [path.split(".")[1] for _, path in COLUMNS["#devices [data-part=now]"] if "." in path]
        figures.fill(device["values"], *of_values)
        figures.fill(device["throttle_seconds"], "thermal", of="seconds")
    figures.fill(view["goodput_seconds"], of="seconds")
    return view


@pytest.mark.parametrize("change", [copy.deepcopy, spread], ids=["as it is", "with no two figures alike"])
def test_every_figure_of_a_table_is_the_one_of_the_run(
    serve: Serve, look: Look, stage: Stage, change: Callable[[View], View]
) -> None:
    """A run with GPUs that goes on. And the other way round: of a run with other figures, each would be found wrong."""
    tab = look(serve(stage(scenes.live)).url, timezone_id="UTC")
    told: list[View] = []

    def answer(route: Any) -> None:
        answered = route.fetch()
        told.append(change(answered.json()))
        route.fulfill(response=answered, body=json.dumps(told[-1]))

    tab.page.route("**/api/run.json", answer)
    tab.open()
    page = tab.until("live")
    page.eval_on_selector("#history [data-part=buckets] details", "details => { details.open = true; }")
    page.wait_for_selector("#history [data-part=buckets] tbody tr")
    view = told[-1]

    assert {table: len(rows_of(view, table)) for table in COLUMNS if not rows_of(view, table)} == {}
    assert list(differences(page, view)) == []

    page.unroute_all(behavior="ignoreErrors")  # one may be under way at the end

    if change is spread:
        wrong = spread(view, 200)
        figures = {
            (table, title)
            for table in (*COLUMNS, *NAMED)
            for title, path in columns_of(wrong, table)
            if path not in IN_WORDS
        }
        assert {(table, title) for table, title, _ in differences(page, wrong)} == figures
        missing = {**view, "ranks": view["ranks"][:1], "devices": [], "sites": [], "nodes": [], "goodput_seconds": {}}
        assert {table for table, _, _ in differences(page, missing)} == {*COLUMNS, *NAMED}
