"""A run of weeks on a clock of our own: fine while it is new, coarse when it is old, and never too large."""

from __future__ import annotations

import os
import random
import sqlite3
from itertools import pairwise
from pathlib import Path

import pytest
from kept_run import WALL_S, state

from gpulaunch.exporters.files.rows import rows_of
from gpulaunch.exporters.store import writing
from gpulaunch.exporters.store.limits import LEVELS, Limits
from gpulaunch.exporters.store.reading import TelemetryReader
from gpulaunch.exporters.store.series import Sample, sample_of
from gpulaunch.exporters.store.writing import HeldByReaderError, TelemetryFile
from gpulaunch.profiler.record import AttemptGroup

HOUR_S, DAY_S = 3600.0, 86400.0
GROUP = AttemptGroup(run_id="aaaa", name="demo", attempt=0, world_size=64, node_rank=0, ranks=())
STEPS = ("gpulaunch_steps_total", "0")
SEQUENCE = ("gpulaunch_collective_sequence", "0")


def rows_by_level(path: Path) -> dict[int, int]:
    with sqlite3.connect(path) as connection:
        rows = dict(connection.execute("SELECT level, count(*) FROM frame GROUP BY level").fetchall())
    connection.close()
    return rows


def size_on_disk(path: Path) -> int:
    return sum(each.stat().st_size for each in path.parent.iterdir())


def look_on(file: TelemetryFile, at_s: float, every_s: float, sample: Sample, attempt: int = 0) -> None:
    with file.writing():
        run = file.run_of(GROUP, host="here", now_s=WALL_S + at_s)
        file.look(sample, run=run, attempt=attempt, begin_s=WALL_S + at_s - every_s, end_s=WALL_S + at_s)


def small(at_s: float) -> Sample:
    return Sample({STEPS: at_s * 10}, {("gpulaunch_shm_bytes", "used"): at_s % 7})


def numbered(at_s: float) -> Sample:
    """The sequence numbers of months of collectives: no float32 has them."""
    return Sample({STEPS: at_s * 10}, {SEQUENCE: 100_000_001 + at_s, ("gpulaunch_shm_bytes", "used"): 1.0})


def test_the_number_of_a_step_or_a_collective_is_kept_to_its_last_digit(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.sqlite"
    with TelemetryFile(path) as file:
        for second in range(1, 31):
            look_on(file, second, 1.0, numbered(second))

    with TelemetryReader(path) as reader:
        fine, coarse = list(reader.frames()), list(reader.frames(step_s=10.0))
        for frame in (*fine, *coarse):
            counters, gauges = reader.values(frame)
            assert gauges[SEQUENCE] == 100_000_001 + frame.end_s - WALL_S, "the newest of a row of ten seconds, too"
            assert SEQUENCE not in counters
            assert gauges["gpulaunch_shm_bytes", "used"] == 1.0
    assert len(coarse) < len(fine) == 30


def test_a_file_of_before_in_which_such_a_number_is_not_exact_is_read_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    path = run_dir / "telemetry.sqlite"
    with monkeypatch.context() as before:
        before.setattr(writing, "NUMBERS", frozenset[str]())
        with TelemetryFile(path) as file:
            for second in (1, 2, 3):
                look_on(file, second, 1.0, numbered(second))
    with TelemetryFile(path) as file:
        look_on(file, 4, 1.0, numbered(4))

    with TelemetryReader(path) as reader:
        read = [reader.values(frame)[1][SEQUENCE] for frame in reader.frames()]
    exported = [row.value for row in rows_of(run_dir, notes=[]) if row.name == SEQUENCE[0]]
    assert read == exported
    assert read[:3] == pytest.approx([100_000_002, 100_000_003, 100_000_004], abs=4)
    assert read[3] == 100_000_005


def test_three_hours_by_the_second(tmp_path: Path) -> None:
    """The newest ten minutes stay as they were seen; two hours by ten seconds; the rest by the minute."""
    path = tmp_path / "telemetry.sqlite"
    with TelemetryFile(path) as file:
        for second in range(1, int(3 * HOUR_S)):
            look_on(file, second, 1.0, small(second))

    by_level = rows_by_level(path)
    assert 600 <= by_level[0] <= 610
    assert 715 <= by_level[1] <= 722
    assert 178 <= by_level[2] <= 180
    assert 16 <= by_level[3] <= 18
    with TelemetryReader(path) as reader:
        every = list(reader.frames())
        steps = [reader.values(frame)[0][STEPS] for frame in every]
        assert [frame.end_s for frame in every] == sorted({frame.end_s for frame in every})
        assert steps == [(frame.end_s - WALL_S) * 10 for frame in every]  # whatever the level, the counter is exact
        assert every[-1].end_s == WALL_S + 3 * HOUR_S - 1
        assert every[0].begin_s <= WALL_S
        lengths = [round(frame.end_s - frame.begin_s) for frame in every]
        assert lengths[1:] == sorted(lengths[1:], reverse=True)  # the first one began within a minute
        gaps = [after.begin_s - before.end_s for before, after in pairwise(every)]
        assert max(map(abs, gaps)) <= 1.0


def test_four_weeks_of_64_ranks_stay_within_the_bound(tmp_path: Path) -> None:
    """The whole run is kept, in rows of nearly one length, however long it is; a bound of a hundredth makes it harder.

    The numbers differ from look to look, as real ones do: what compresses to nothing would prove nothing.
    """
    path = tmp_path / "telemetry.sqlite"
    limits = Limits(file_bytes=1 << 20, ahead_bytes=1 << 20)
    dice = random.Random(7)
    totals = [0.0] * 64
    every_s, until_s, largest = 1200.0, 28 * DAY_S, 0
    with TelemetryFile(path, limits) as file:
        for at_s in range(1200, int(until_s), int(every_s)):
            totals = [total + dice.random() * every_s for total in totals]
            sample = Sample(
                {("gpulaunch_phase_seconds_total", str(rank), "forward"): total for rank, total in enumerate(totals)},
                {("gpulaunch_host_memory_bytes", str(rank), "trainer", "rss"): dice.random() for rank in range(64)},
            )
            look_on(file, at_s, every_s, sample, attempt=at_s // 500_000)
            if not at_s % 12_000:
                largest = max(largest, size_on_disk(path))

    assert largest <= limits.file_bytes + limits.ahead_bytes
    assert size_on_disk(path) <= limits.file_bytes
    with TelemetryReader(path) as reader:
        oldest_s, newest_s = reader.span() or (0.0, 0.0)
        assert oldest_s <= WALL_S + 1200
        assert newest_s == WALL_S + until_s - 1200
        coarse = [frame.end_s - frame.begin_s for frame in reader.frames(until_s=WALL_S + until_s - 3 * DAY_S)]
        assert max(coarse) <= 4 * sorted(coarse)[len(coarse) // 2]
        last = list(reader.frames())[-1]
        assert reader.values(last)[0]["gpulaunch_phase_seconds_total", "63", "forward"] == pytest.approx(
            totals[63], abs=1e-3
        )


def test_a_full_node_of_64_ranks_fits_by_its_own_numbers(tmp_path: Path) -> None:
    """Every series of 64 ranks: what a row comes to, times the rows there may be, is kept below each level's share."""
    path = tmp_path / "telemetry.sqlite"
    limits = Limits(file_bytes=6 << 20)
    dice = random.Random(7)
    with TelemetryFile(path, limits) as file:
        whole = sample_of(state(100.0, ranks=range(64), gpu=True))
        assert len(whole.counters) + len(whole.gauges) > 64 * 40
        for at_s in range(1, 400):
            sample = Sample(
                {key: value + at_s * dice.random() for key, value in whole.counters.items()},
                {key: value * dice.random() for key, value in whole.gauges.items()},
            )
            look_on(file, at_s, 1.0, sample)

        assert size_on_disk(path) <= limits.file_bytes + limits.ahead_bytes
    assert size_on_disk(path) <= limits.file_bytes
    assert 10 < rows_by_level(path)[0] < 399  # its share was used up: the oldest seconds went early
    with TelemetryReader(path) as reader:
        kept_s = [frame.end_s - frame.begin_s for frame in reader.frames()]
    assert sum(kept_s) > 5 * rows_by_level(path)[0]  # and what they were folded into is there for longer


def test_the_shares_leave_room_for_the_rest() -> None:
    assert sum(level.share for level in LEVELS) <= 0.7
    assert [level.length_s for level in LEVELS] == sorted(level.length_s for level in LEVELS)


def test_sidecars_and_attempts_go_on_in_the_same_file(tmp_path: Path) -> None:
    """Forty sidecars, each killed after a minute and a bit: the rows of ten seconds and of minutes have no seam."""
    path = tmp_path / "telemetry.sqlite"
    at_s = 0
    for attempt in range(40):
        with TelemetryFile(path) as file:
            for _ in range(67):
                at_s += 1
                look_on(file, at_s, 1.0, small(at_s), attempt=attempt)

    with TelemetryReader(path) as reader:
        minutes = [frame for frame in reader.frames(step_s=60) if frame.end_s - frame.begin_s > 30]
        assert len(minutes) >= 42
        assert {round(frame.end_s - frame.begin_s) for frame in minutes[1:]} == {60}
        assert {frame.attempt for frame in reader.frames()} >= set(range(30, 40))


def test_a_reader_that_does_not_end_cannot_make_the_log_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.sqlite"
    limits = Limits(ahead_bytes=256 << 10, lock_wait_s=0.001)
    dice = random.Random(7)
    with TelemetryFile(path, limits) as file:
        look_on(file, 1, 1.0, small(1))
        reader = TelemetryReader(path)
        refused = 0
        for at_s in range(2, 400):
            gauges = {("gpulaunch_shm_bytes", str(i)): dice.random() for i in range(500)}
            try:
                look_on(file, at_s, 1.0, Sample({}, gauges))
            except HeldByReaderError:
                refused += 1
        assert refused > 0
        assert os.stat(f"{path}-wal").st_size <= limits.ahead_bytes
        reader.close()
        look_on(file, 400, 1.0, small(400))


def test_what_is_known_of_an_attempt_comes_back_as_it_was(tmp_path: Path) -> None:
    content = {
        "version": 1,
        "none": None,
        "list": [[1, "a\x1b\udc80"], []],
        "object": {"0": {"x": [True]}},
        "empty": {},
    }
    with TelemetryFile(tmp_path / "telemetry.sqlite") as file, file.writing():
        file.document(content, run=1, attempt=0, at_s=WALL_S)

        assert file.document_of(1, 0) == content
        assert file.document_of(1, 1) is None
