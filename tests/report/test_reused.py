"""The report of a directory that was used before: one axis for both runs, and nothing on it before its beginning."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from kept_run import WALL_S, line, state
from parsed import parse
from runs_on_disk import begin, end, keep

from gpulaunch.exporters.report.content import report_of
from gpulaunch.exporters.report.document import Chart, Span
from gpulaunch.exporters.report.page import as_html
from gpulaunch.exporters.report.svg import still
from gpulaunch.exporters.report.time_axis import clock_of, slices
from gpulaunch.exporters.view.load import load_run
from gpulaunch.exporters.view.model import RunView

BETWEEN_S = 10_000


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    """A run that failed, one that was killed, each an hour and more before the next, and one that went well."""
    run_dir: Path = tmp_path_factory.mktemp("reused") / "run"
    begin(run_dir)
    keep(run_dir, [state(second) for second in range(1, 60)])
    end(run_dir, 60, code=1)
    for number, run_id in ((1, "killed"), (2, "newest")):
        shift_s = number * BETWEEN_S
        begin(run_dir, run_id=run_id, at_s=shift_s)
        states = [state(second, run_id=run_id) for second in range(1, 100)]
        keep(
            run_dir,
            [
                replace(
                    each,
                    taken_monotonic_ns=each.taken_monotonic_ns + shift_s * 10**9,
                    taken_wall_ns=each.taken_wall_ns + shift_s * 10**9,
                )
                for each in states
            ],
        )
    end(run_dir, 2 * BETWEEN_S + 100)
    return load_run(run_dir, now_s=WALL_S + 3 * BETWEEN_S)


def test_time_is_since_the_first_run_began(view: RunView) -> None:
    clock = clock_of(view)

    assert clock.zero_s == WALL_S - 10
    assert clock.times[0] > 0
    assert clock.of(view.began_s or 0.0) * clock.seconds_per_unit == pytest.approx(2 * BETWEEN_S)
    names = [name for name, _ in slices(view)]
    assert not any(re.match(r"0 s|.* to 0 s", name) for name in names[1:]), names


def test_attempts_of_all_runs_are_where_they_were(view: RunView) -> None:
    page = as_html(report_of(view))
    taken = parse(page)

    assert ("attempts", "1") in {tuple(row) for table in taken.tables for row in table}, "of the newest run"
    attempts = next(table for table in taken.tables if table[0][0] == "Attempt")
    assert [(row[0], row[3]) for row in attempts[1:]] == [
        ("attempts/0 (earlier run)", "failed"),
        ("attempts/1 (earlier run)", "lost"),
        ("0", "finished"),
    ]
    assert [row[1] for row in attempts[1:]] == ["1 s", "2 h 47 min", "5 h 33 min"]
    assert [row[2] for row in attempts[1:]] == ["1 min 09 s", "-", "1 min 49 s"], "nobody knows when the second ended"
    (history,) = (table for table in taken.tables if "Details" in table[0])
    assert history[-1][:2] == ["0 s", "run started"]
    assert not any(cell.startswith(("-", "\N{MINUS SIGN}")) for row in history[1:] for cell in row[:1])
    assert "this run started 5 h 33 min after it" in taken.text
    (drawn,) = re.findall(r"<svg[^>]*chart-attempts-title.*?</svg>", page, re.DOTALL)
    boxes = [
        (float(x), float(x) + float(wide)) for x, wide in re.findall(r'<rect[^>]*x="(.*?)".*?width="(.*?)"', drawn)
    ]
    assert len(boxes) == 3
    assert all(end <= begin + 1.05 for (_, end), (begin, _) in pairwise(boxes)), "one after another"
    assert "lost, end time unknown" in drawn


def test_a_directory_of_one_run_says_nothing_of_others(view: RunView, tmp_path: Path) -> None:
    begin(tmp_path / "run")
    end(tmp_path / "run", 100)

    taken = parse(as_html(report_of(load_run(tmp_path / "run"))))

    assert "earlier runs" not in taken.text
    assert clock_of(load_run(tmp_path / "run")).zero_s == WALL_S - 10


def test_where_the_first_run_left_no_attempt_it_is_the_beginning_all_the_same(tmp_path: Path) -> None:
    """It was told to end before its ranks were there."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text(line("run_started", -500, run_id="first"))
    begin(tmp_path / "run")
    end(tmp_path / "run", 100)
    view = load_run(tmp_path / "run")

    assert clock_of(view).zero_s == WALL_S - 500
    assert "this run started 8 min 10 s after it" in parse(as_html(report_of(view))).text


def test_a_span_is_within_the_box_wherever_its_ends_are() -> None:
    ends = ((-9.0, -5.0), (-5.0, 3.0), (2.0, 10.0), (8.0, 7.0))
    drawn = still(
        Chart(
            id="spans",
            title="Spans",
            kind="spans",
            unit="s",
            summary="",
            spans=tuple(Span(label="a", begin=begin, end=end, text="", colour=0) for begin, end in ends),
        )
    )

    boxes = [(float(x), float(wide)) for x, wide in re.findall(r'<rect[^>]*x="(.*?)".*?width="(.*?)"', drawn)]
    room = 760 - 96 - 56
    assert boxes == [
        pytest.approx((96.0, 1.0)),
        pytest.approx((96.0, 0.3 * room), abs=0.1),
        pytest.approx((96 + 0.2 * room, 0.8 * room), abs=0.1),
        pytest.approx((96 + 0.8 * room, 1.0), abs=0.1),
    ]
