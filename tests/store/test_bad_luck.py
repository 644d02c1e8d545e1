"""Everything that can happen to the file while a job runs: none of it is the job's business, all of it is told."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from kept_run import GC, SYNC, WALL_S, announce, line, state

from gpulaunch.exporters.store.attempt_facts import values_of
from gpulaunch.exporters.store.limits import Limits
from gpulaunch.exporters.store.locations import TELEMETRY_FILE, files_of, is_shared
from gpulaunch.exporters.store.reading import TelemetryReader, UnreadableError
from gpulaunch.exporters.store.telemetry_writer import TelemetryWriter
from gpulaunch.exporters.store.writing import TelemetryFile
from gpulaunch.profiler.record import NodeState

PATIENCE_S = 30.0


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    announce(tmp_path / "channel", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keeper(run_dir: Path, clock: Clock) -> TelemetryWriter:
    return TelemetryWriter(run_dir.parent / "channel", clock=clock)


def kept(run_dir: Path) -> list[float]:
    """The times of the looks, in seconds of the run."""
    with TelemetryReader(run_dir / TELEMETRY_FILE) as reader:
        return [round(frame.end_s - WALL_S, 3) for frame in reader.newest(1000)]


def close(keeper: TelemetryWriter) -> None:
    """End a keeper whose thread never began."""
    keeper.write_now(None, last=True)


# -- the thread


def test_the_sidecar_never_waits_for_a_disk_that_hangs(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest state wins: of a hundred that came while the disk hung, one is stored, and 99 are told as skipped."""
    hangs, entered = threading.Event(), threading.Event()
    look = TelemetryFile.look

    def hanging(file: TelemetryFile, *args: object, **named: object) -> None:
        entered.set()
        assert hangs.wait(PATIENCE_S)
        look(file, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(TelemetryFile, "look", hanging)
    keeper = TelemetryWriter(run_dir.parent / "channel")
    keeper.keep(state(1.0))
    assert entered.wait(PATIENCE_S)
    for second in range(2, 102):
        keeper.keep(state(second))  # comes back at once: the thread cannot have taken it

    assert keeper.skipped == 99
    assert not keeper.close(within_s=0.01)  # nor does the end wait
    hangs.set()
    assert keeper.close(within_s=PATIENCE_S)
    assert kept(run_dir) == [1.0, 101.0]


def test_what_is_handed_over_last_is_stored_at_the_end(run_dir: Path) -> None:
    keeper = TelemetryWriter(run_dir.parent / "channel")
    keeper.keep(state(1.0))
    keeper.keep(state(2.0))

    assert keeper.close(within_s=PATIENCE_S)
    assert kept(run_dir)[-1] == 2.0
    assert keeper.condition.available
    assert sorted(path.name for path in run_dir.iterdir()) == [TELEMETRY_FILE]  # no log beside it any more
    assert (run_dir / TELEMETRY_FILE).stat().st_mode & 0o777 == 0o600


def steps_of(run_dir: Path) -> dict[int, list[float]]:
    """By attempt, how many steps each rank had made when it was seen last."""
    steps: dict[int, list[float]] = {}
    with TelemetryReader(run_dir / TELEMETRY_FILE) as reader:
        for document in reader.documents():
            counters = values_of(document.content, "counters")
            steps[document.attempt] = [counters["gpulaunch_steps_total", str(rank)] for rank in (0, 1)]
    return steps


def test_a_last_look_that_comes_soon_after_the_one_before_is_stored_when_it_turns_out_to_be_the_last(
    run_dir: Path, keeper: TelemetryWriter
) -> None:
    """A sidecar that is told to stop looks once more, and hands that over before it lets the thread know."""
    keeper.write_now(state(1.0))
    keeper.write_now(state(1.2, findings=(SYNC,)))
    keeper.write_now(state(1.4, findings=(SYNC,)))
    assert kept(run_dir) == [1.0]  # too soon for a write of its own, should another follow

    keeper.write_now(None, last=True)

    assert kept(run_dir) == [1.0, 1.4]
    assert steps_of(run_dir) == {0: [14.0, 14.0]}
    with TelemetryReader(run_dir / TELEMETRY_FILE) as reader:
        (found,) = reader.findings()
        assert reader.values(reader.newest(1)[0])[0]["gpulaunch_microsteps_total", "0"] == 14.0
    assert found.last_seen_s - WALL_S == pytest.approx(1.4)
    assert found.lost_seconds == pytest.approx(4 * 0.02)


def test_where_looks_are_stored_seldom_the_last_one_of_a_rank_and_of_an_attempt_is(
    run_dir: Path, keeper: TelemetryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system: rank 1 ends, then rank 0; the next attempt is soon over, too."""
    for module in ("schema", "writing"):
        monkeypatch.setattr(f"gpulaunch.exporters.store.{module}.is_shared", lambda path: True)
    for second in (1, 2, 3):
        keeper.write_now(state(second))
    for second in (4, 5):
        keeper.write_now(state(second, ranks=(0,)))
    for second in (6, 7):
        keeper.write_now(state(second, attempt=1))
    keeper.write_now(None, last=True)

    assert kept(run_dir) == [1.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert steps_of(run_dir) == {0: [50.0, 30.0], 1: [70.0, 70.0]}


def test_where_no_thread_can_be_had_it_is_told_and_the_next_state_is_stored(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    keeper = TelemetryWriter(run_dir.parent / "channel")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        keeper.keep(state(1.0))
    assert not keeper.condition.available
    assert keeper.condition.reason == f"{TELEMETRY_FILE}: no thread to write it"

    keeper.keep(state(2.0))
    assert keeper.close(within_s=PATIENCE_S)
    assert keeper.condition.available
    assert kept(run_dir) == [2.0]


def test_before_the_agent_has_named_a_directory_nothing_happens(tmp_path: Path) -> None:
    keeper = TelemetryWriter(tmp_path)
    keeper.write_now(state(1.0, ended=True))
    keeper.write_now(state(1.0))

    assert keeper.condition.available
    assert list(tmp_path.iterdir()) == []


# -- killed


def test_killed_at_any_moment_the_file_is_whole_and_goes_on(run_dir: Path) -> None:
    """A real process, killed a dozen times within its first writes; every acknowledged look is in the file."""
    dice = random.Random(20)
    program = Path(__file__).parent / "killed_writer.py"
    at_s, seen = 0.0, 0
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, str(program), str(run_dir.parent / "channel"), str(at_s)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        at_s = float(writer.stdout.readline())
        stop = threading.Timer(dice.uniform(0.0, 0.15), writer.send_signal, (signal.SIGKILL,))
        stop.start()
        lines = writer.stdout.read().split("\n")
        writer.wait()
        writer.stdout.close()
        stop.join()
        assert writer.returncode == -signal.SIGKILL
        at_s = max([at_s, *(float(each) for each in lines[:-1])])
        with TelemetryReader(run_dir / TELEMETRY_FILE) as reader:
            newest = reader.newest(1)[0].end_s - WALL_S
            assert newest >= at_s - 0.001  # what was acknowledged is there
            at_s, seen = max(at_s, newest), seen + 1
        connection = sqlite3.connect(run_dir / TELEMETRY_FILE)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()

    assert seen == 12
    times = kept(run_dir)
    assert times == sorted(set(times))


# -- no room, no right, no peace


NO_ROOM = """
import itertools, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from kept_run import state
from gpulaunch.exporters.store.telemetry_writer import TelemetryWriter
later = itertools.count(step=100.0)  # every pause between two tries is over
keeper = TelemetryWriter(Path(sys.argv[1]), clock=lambda: next(later))
for second in range(1, 4):
    keeper.write_now(state(second))
assert keeper.condition.available, keeper.condition
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
for second in range(4, 8):
    keeper.write_now(state(second))
assert not keeper.condition.available
print(keeper.condition.reason, keeper.condition.errors)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
keeper.write_now(state(8.0))
keeper.write_now(state(9.0))
assert keeper.condition.available, keeper.condition
keeper.write_now(None, last=True)
"""


def test_where_files_may_not_grow_it_is_told_and_goes_on_when_they_may_again(run_dir: Path) -> None:
    channel = str(run_dir.parent / "channel")
    done = subprocess.run(
        [sys.executable, "-c", NO_ROOM, channel, str(Path(__file__).parent)], capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{TELEMETRY_FILE}: ")
    assert kept(run_dir)[:3] == [1.0, 2.0, 3.0]
    assert kept(run_dir)[-1] == 9.0


FULL_DISK = """
set -e
mount -t tmpfs -o size=400k tmpfs "$1"
exec "$2" -c '
import itertools, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from kept_run import state
from gpulaunch.exporters.store.telemetry_writer import TelemetryWriter
later = itertools.count(step=100.0)  # every pause between two tries is over
run, channel = Path(sys.argv[1]), Path(sys.argv[1]).parent / "channel"
keeper = TelemetryWriter(channel, clock=lambda: next(later))
keeper.write_now(state(1.0))
assert keeper.condition.available, keeper.condition
with open(run / "filler", "wb", buffering=0) as filler:
    try:
        while True: filler.write(bytes(4096))
    except OSError: pass
for second in range(2, 60): keeper.write_now(state(second, gpu=True))
print(keeper.condition.reason)
assert not keeper.condition.available
os.unlink(run / "filler")
for second in range(60, 62): keeper.write_now(state(second))
print(keeper.condition.available)
os.chdir("/"); keeper.write_now(None, last=True)
from gpulaunch.exporters.store.reading import TelemetryReader
with TelemetryReader(run / "telemetry.sqlite") as reader:
    print(len(reader.newest(100)) >= 3)
' "$1" "$3"
"""
READ_ONLY = """
set -e
mount -t tmpfs -o ro tmpfs "$1"
exec "$2" -c '
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from kept_run import state
from gpulaunch.exporters.store.telemetry_writer import TelemetryWriter
keeper = TelemetryWriter(Path(sys.argv[1]).parent / "channel")
keeper.write_now(state(1.0))
print(keeper.condition.available, keeper.condition.reason)
' "$1" "$3"
"""


def in_a_mount(script: str, run_dir: Path) -> str:
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(run_dir), sys.executable, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no mounts of our own here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.root
def test_a_full_disk_is_told_and_what_is_there_stays(run_dir: Path) -> None:
    reason, again, whole = in_a_mount(FULL_DISK, run_dir).splitlines()

    assert reason == f"{TELEMETRY_FILE}: no room: the disk is full"
    assert (again, whole) == ("True", "True")


@pytest.mark.root
def test_a_read_only_file_system_is_told(run_dir: Path) -> None:
    assert in_a_mount(READ_ONLY, run_dir) == f"False {TELEMETRY_FILE}: Read-only file system\n"


def test_a_directory_that_went_away_is_told_and_tried_again_later_and_later(
    run_dir: Path, keeper: TelemetryWriter, clock: Clock
) -> None:
    run_dir.rmdir()
    for second in range(1, 200):
        clock.now_s = second
        keeper.write_now(state(second))

    assert keeper.condition.reason == f"{TELEMETRY_FILE}: No such file or directory"
    assert keeper.condition.errors == 9  # 1, 2, 4 ... 60 s apart
    run_dir.mkdir()
    clock.now_s += 60
    keeper.write_now(state(300.0))
    assert keeper.condition.available
    close(keeper)
    assert kept(run_dir) == [300.0]


def test_a_link_to_another_file_is_not_followed(run_dir: Path, keeper: TelemetryWriter) -> None:
    other = run_dir.parent / "other"
    other.write_text("precious")
    (run_dir / TELEMETRY_FILE).symlink_to(other)

    keeper.write_now(state(1.0))

    assert not keeper.condition.available
    assert other.read_text() == "precious"


def test_another_process_that_locks_the_file_holds_nothing_up_for_long(
    run_dir: Path, keeper: TelemetryWriter, clock: Clock
) -> None:
    keeper.write_now(state(1.0))
    other = sqlite3.connect(run_dir / TELEMETRY_FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    clock.now_s = 2.0
    keeper.write_now(state(2.0))

    assert keeper.condition.reason == f"{TELEMETRY_FILE}: locked by another process"
    assert kept(run_dir) == [1.0]  # it is readable all the while
    other.execute("COMMIT")
    other.close()
    clock.now_s = 10.0
    keeper.write_now(state(10.0))
    assert keeper.condition.available
    close(keeper)
    assert kept(run_dir) == [1.0, 10.0]


# -- damaged, newer, not ours


@pytest.mark.parametrize("how", ["not a database", "torn in the middle"])
def test_a_damaged_file_is_set_aside_and_one_line_says_so(
    run_dir: Path, keeper: TelemetryWriter, clock: Clock, how: str
) -> None:
    path = run_dir / TELEMETRY_FILE
    if how == "not a database":
        path.write_bytes(b"This is no database, whatever its name says." * 100)
    else:
        with TelemetryFile(path) as file, file.writing():
            for number in range(300):
                file.event("filler", {"text": "x" * 2000, "number": number}, at_s=WALL_S)
        with open(path, "r+b") as torn:
            torn.seek(8192)
            torn.write(os.urandom(200_000))
    before = path.read_bytes()

    keeper.write_now(state(1.0))

    assert not keeper.condition.available
    assert keeper.condition.errors == 1
    assert "damaged" in keeper.condition.reason
    assert keeper.condition.reason.endswith(f"; set aside as {TELEMETRY_FILE}.damaged, begun anew")
    assert (run_dir / f"{TELEMETRY_FILE}.damaged").read_bytes() == before
    keeper.write_now(state(2.0))
    assert keeper.condition.available
    assert "set aside" in keeper.condition.reason  # what failed last stays told
    close(keeper)
    assert kept(run_dir) == [2.0]


def test_a_file_that_is_damaged_while_it_is_open_is_set_aside_too(
    run_dir: Path, keeper: TelemetryWriter, clock: Clock
) -> None:
    for second in range(1, 40):
        keeper.write_now(state(second))
    path = run_dir / TELEMETRY_FILE
    other = sqlite3.connect(path, isolation_level=None)  # whose lock makes the writer open the file again
    other.execute("BEGIN EXCLUSIVE")
    keeper.write_now(state(40.0))
    assert keeper.condition.errors == 1
    other.execute("COMMIT")
    other.close()
    with open(path, "r+b") as torn:
        torn.seek(100)
        torn.write(os.urandom(50_000))
    for second in range(41, 45):
        clock.now_s = second
        keeper.write_now(state(second))
    close(keeper)

    assert keeper.condition.errors >= 2
    assert (run_dir / f"{TELEMETRY_FILE}.damaged").exists()
    assert kept(run_dir)[-1] == 44.0


def test_a_newer_file_is_refused_and_left_as_it_is(run_dir: Path, keeper: TelemetryWriter, clock: Clock) -> None:
    path = run_dir / TELEMETRY_FILE
    TelemetryFile(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=7")
    connection.close()
    before = path.read_bytes()
    for second in range(1, 100):
        clock.now_s = second
        keeper.write_now(state(second))

    newer = "is of a newer gpulaunch (schema 7, this one knows 1): left alone"
    assert keeper.condition.reason == f"{TELEMETRY_FILE}: {newer}"
    assert keeper.condition.errors == 1  # said once
    assert path.read_bytes() == before
    with pytest.raises(UnreadableError, match="schema 7, this one knows 1"):
        TelemetryReader(path)


def test_a_database_of_another_program_is_refused(run_dir: Path, keeper: TelemetryWriter) -> None:
    path = run_dir / TELEMETRY_FILE
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()

    keeper.write_now(state(1.0))

    assert keeper.condition.reason == f"{TELEMETRY_FILE}: is not gpulaunch's: move it away"
    with pytest.raises(UnreadableError, match="not of gpulaunch"):
        TelemetryReader(path)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


@pytest.mark.parametrize(
    "planted",
    [
        f"DROP TABLE series; CREATE VIEW series AS {ENDLESS} SELECT 0 AS counts, i AS slot, 'a' AS name, '[]' FROM n",
        f"CREATE VIEW more AS {ENDLESS} SELECT i FROM n",
        "CREATE TRIGGER later AFTER INSERT ON event BEGIN DELETE FROM frame; END",
        "ALTER TABLE run ADD COLUMN theirs",
    ],
    ids=["endless table", "view", "trigger", "column"],
)
def test_a_file_with_other_tables_than_ours_is_not_read_and_not_written_to(
    run_dir: Path, keeper: TelemetryWriter, clock: Clock, planted: str
) -> None:
    """Whoever reads a view or writes where a trigger is runs what somebody else has written."""
    path = run_dir / TELEMETRY_FILE
    TelemetryFile(path).close()
    with sqlite3.connect(path) as connection:
        connection.executescript(planted)
    connection.close()

    with pytest.raises(UnreadableError, match="is damaged: it has other tables than gpulaunch's"):
        TelemetryReader(path)
    for second in range(1, 100):
        clock.now_s = second
        keeper.write_now(state(second))
    close(keeper)
    assert path.with_name(f"{TELEMETRY_FILE}.damaged").exists()
    assert kept(run_dir)[-1] == 99.0


# -- read while it is written, clocks, places


def test_readers_see_a_whole_file_while_it_is_written(run_dir: Path) -> None:
    """Two hundred looks on one side, readers without a pause on the other: never an error, never a step back."""
    path = run_dir / TELEMETRY_FILE
    done = threading.Event()
    counts: list[int] = []
    wrong: list[Exception] = []

    def read() -> None:
        while not done.is_set():
            try:
                with TelemetryReader(path) as reader:
                    counts.append(len(list(reader.frames())))
                    reader.events(), reader.findings(), reader.documents()
                    wrong.extend(ValueError(note) for note in reader.notes)
            except Exception as error:
                wrong.append(error)

    with TelemetryFile(path):
        pass
    keeper = TelemetryWriter(run_dir.parent / "channel")
    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for second in range(1, 200):
            keeper.write_now(state(second, findings=(SYNC,) if second % 2 else (GC,)))
    finally:
        done.set()
        for thread in threads:
            thread.join()
        close(keeper)

    assert wrong == []
    assert max(counts) > 10
    assert len(kept(run_dir)) == 199


def test_a_clock_that_is_set_back_or_forth_moves_no_row(run_dir: Path, keeper: TelemetryWriter) -> None:
    shifts = {5: 0.0, 10: -3600.0, 15: 86_400.0, 20: 0.0}
    shift_s = 0.0
    for second in range(1, 25):
        shift_s = shifts.get(second, shift_s)
        seen = state(second)
        keeper.write_now(replace(seen, taken_wall_ns=seen.taken_wall_ns + round(shift_s * 1e9)))
    close(keeper)

    assert kept(run_dir) == [float(second) for second in range(1, 25)]


def test_a_sidecar_that_begins_on_a_clock_set_back_goes_on_behind_what_is_there(run_dir: Path) -> None:
    for first, shift_s in ((1, 0.0), (11, -3600.0)):
        keeper = TelemetryWriter(run_dir.parent / "channel")
        for second in range(first, first + 10):
            seen = state(second)
            keeper.write_now(replace(seen, taken_wall_ns=seen.taken_wall_ns + round(shift_s * 1e9)))
        close(keeper)

    assert kept(run_dir) == [float(second) for second in range(1, 21)]


def test_each_node_has_its_own_file(run_dir: Path) -> None:
    """Several sidecars on a directory that nodes share never write one file."""
    for node in (0, 1, 12):
        directory = run_dir / f"node-{node}" if node else run_dir
        announce(run_dir.parent / f"channel-{node}", directory)
        keeper = TelemetryWriter(run_dir.parent / f"channel-{node}")
        keeper.write_now(state(1.0, ranks=(2 * node, 2 * node + 1), node=node))
        close(keeper)

    assert [(node, path.parent.name) for node, path in files_of(run_dir)] == [
        (0, "run"),
        (1, "node-1"),
        (12, "node-12"),
    ]


@pytest.mark.parametrize(("kind", "shared"), [("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("ext4", False)])
def test_a_network_file_system_is_known_by_its_mount(tmp_path: Path, kind: str, shared: bool) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - {kind} source rw\n")

    assert is_shared(tmp_path, mountinfo=mounts) is shared


def test_on_a_network_file_system_there_is_no_write_ahead_log(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts have no memory in common: the file itself is all there is, and it is readable all the same."""
    for module in ("schema", "writing"):
        monkeypatch.setattr(f"gpulaunch.exporters.store.{module}.is_shared", lambda path: True)
    keeper = TelemetryWriter(run_dir.parent / "channel")
    for second in range(1, 22):
        keeper.write_now(state(second))
        assert not (run_dir / f"{TELEMETRY_FILE}-wal").exists()
        assert kept(run_dir)[-1] > second - 5
    close(keeper)
    assert kept(run_dir) == [1.0, 6.0, 11.0, 16.0, 21.0]  # every look waits for a server: fewer do


# -- what else is kept


def test_findings_come_and_go_and_what_they_cost_adds_up(run_dir: Path, keeper: TelemetryWriter) -> None:
    """A hundred steps, 20 ms longer each, are 2 s lost; a finding that comes back goes on where it was."""
    for second in range(31):
        standing = (SYNC,) if 1 <= second <= 5 or second > 25 else ()
        keeper.write_now(state(second, findings=standing))
    close(keeper)

    with TelemetryReader(run_dir / TELEMETRY_FILE) as reader:
        (found,) = reader.findings()
        told = [(what, round(at_s - WALL_S)) for at_s, what, _ in reader.events()]
    assert found.told["rule"] == "sync-every-step"
    assert (found.first_seen_s - WALL_S, found.last_seen_s - WALL_S, found.active) == (1.0, 30.0, True)
    assert found.lost_seconds == pytest.approx(100 * 0.02)
    assert told == [("finding_came", 1), ("finding_went", 6), ("finding_came", 26)]


def test_a_finding_costs_nothing_while_nobody_trains(run_dir: Path, keeper: TelemetryWriter) -> None:
    """It stands through a hang, which no window ends, and through the restart; the step that hung is one step."""

    def seen(second: float, trained_s: float, attempt: int = 0) -> NodeState:
        ranks = state(trained_s).training
        return replace(state(second, attempt=attempt, findings=(SYNC,)), training=ranks)

    for second in range(11):
        keeper.write_now(seen(second, second))
    for second in range(11, 1811, 5):
        keeper.write_now(seen(second, 10.0))
    keeper.write_now(seen(1811, 10.1))
    keeper.write_now(replace(seen(1812, 10.1), training=()))
    for second in range(11):
        keeper.write_now(seen(1820 + second, 10.1 + second, attempt=1))
    close(keeper)

    with TelemetryReader(run_dir / TELEMETRY_FILE) as reader:
        (found,) = reader.findings()
    assert found.active
    assert found.lost_seconds == pytest.approx((100 + 1 + 100) * 0.02)


def test_what_was_made_while_nothing_could_be_kept_is_not_charged_to_a_finding(
    run_dir: Path, keeper: TelemetryWriter
) -> None:
    """An hour of a full disk: nobody knows for how much of it the finding stood."""
    for second in (*range(11), *range(3610, 3621)):
        keeper.write_now(state(second, findings=(SYNC,)))
    close(keeper)

    with TelemetryReader(run_dir / TELEMETRY_FILE) as reader:
        (found,) = reader.findings()
    assert found.lost_seconds == pytest.approx((100 + 100) * 0.02)


def test_the_history_of_the_run_and_the_causes_of_its_failures_are_carried_over(
    run_dir: Path, keeper: TelemetryWriter
) -> None:
    history = run_dir / "events.jsonl"
    began = line("run_started", -10, run_id="aaaa", pid=1)
    history.write_text(began + "no json\n" + line("started", 0, seen_s=7.5, attempt=0))
    keeper.write_now(state(1.0))
    attempt = run_dir / "attempts" / "0"
    attempt.mkdir(parents=True)
    first = {"rank": 1, "kind": "segfault", "headline": "rank 1 was killed", "why": "first", "advice": "look"}
    (attempt / "failure.json").write_text(json.dumps({"version": 1, "first": first, "exit_code": 139, "attempt": 0}))
    with open(history, "a") as more:
        more.write(line("phase", 2, phase="clearing", attempt=0) + '{"half": ')
    keeper.write_now(state(2.0, restarts={"segfault": 1}))
    with open(history, "a") as more:
        more.write('"a line", "event": "late", "time_s": 1.0}\n')
    keeper.write_now(state(3.0, attempt=1))
    close(keeper)

    with TelemetryReader(run_dir / TELEMETRY_FILE) as reader:
        told = [(what, fields) for _, what, fields in reader.events()]
        failures = reader.failures()
        documents = reader.documents()
    assert [what for what, _ in told] == ["run_started", "started", "phase", "late"]
    assert [fields.get("attempt") for _, fields in told] == [None, 0, 0, None]
    assert told[1][1] == {"attempt": 0}, "what the node's own clock showed says nothing later"
    assert failures[0]["headline"] == "rank 1 was killed"
    assert [document.attempt for document in documents] == [0, 1]


def test_texts_of_any_length_and_kind_are_stored(run_dir: Path, keeper: TelemetryWriter) -> None:
    odd = replace(SYNC, file="a\udcff\x1b[31m\n.py", subject="x" * 100_000, advice="\u202e")
    (run_dir / "events.jsonl").write_text(line("noise", 0, text="y" * 200_000, bad="\ud800"))
    keeper.write_now(state(1.0, findings=(odd,)))
    keeper.write_now(state(2.0, findings=(odd,)))
    close(keeper)

    assert keeper.condition.errors == 0
    with TelemetryReader(run_dir / TELEMETRY_FILE) as reader:
        (found,) = reader.findings()
        assert found.told["file"] in ("a\udcff\x1b[31m\n.py", "a\\udcff\x1b[31m\n.py")
        assert max(len(json.dumps(fields)) for _, _, fields in reader.events()) <= 4096


def test_a_bound_is_a_bound_for_events_too(tmp_path: Path) -> None:
    with TelemetryFile(tmp_path / TELEMETRY_FILE, Limits(most_events=50)) as file:
        for number in range(500):
            with file.writing():
                file.event("tick", {"number": number}, at_s=WALL_S + number)
    with TelemetryReader(tmp_path / TELEMETRY_FILE) as reader:
        assert [fields["number"] for _, _, fields in reader.events()] == list(range(450, 500))
