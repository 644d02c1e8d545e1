from __future__ import annotations

import fcntl
import os
import resource
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulaunch.launcher.job.spec import Std
from gpulaunch.launcher.logs.capture import LogHub
from gpulaunch.launcher.logs.console import (
    CONGESTED_BYTES,
    LIVE_PERIOD_S,
    PART_PERIOD_S,
    PROGRESS_PERIOD_S,
    Console,
)

pytestmark = pytest.mark.timeout(120)


class Job:
    """A hub with its console, and the write ends that ranks would have."""

    def __init__(self, loop: Any, out: Any, err: Any, directory: Path, **filters: Any) -> None:
        self.loop = loop
        self.directory = directory
        self.console = Console(loop, stdout_fd=out.write_fd, stderr_fd=err.write_fd)
        self.hub = LogHub(loop, self.console, **filters)
        self.ends: list[int] = []

    def open(self, rank: int, stream: Std = Std.OUT, *, name: str = "", show: bool = True, **more: Any) -> int:
        path = self.directory / (name or f"{rank}-{stream.name}.log")
        end = self.hub.open(rank=rank, local_rank=rank, stream=stream, path=str(path), show=show, **more)
        self.ends.append(end)
        return end

    def hand_over(self, end: int) -> None:
        """The rank has it: close ours."""
        self.ends.remove(end)
        os.close(end)

    def file(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()

    def close(self) -> None:
        for end in self.ends:
            os.close(end)
        self.ends.clear()
        self.hub.close()
        self.console.close()


@pytest.fixture
def job(loop: Any, pipe: Any, err_pipe: Any, tmp_path: Path) -> Iterator[Job]:
    job = Job(loop, pipe, err_pipe, tmp_path)
    yield job
    job.close()


@pytest.fixture
def terminal_job(loop: Any, terminal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("NO_COLOR", "1")
    job = Job(loop, terminal, terminal, tmp_path)
    yield job
    job.close()


def test_bytes_go_to_the_file_and_lines_to_the_console(job: Job, pipe: Any, err_pipe: Any) -> None:
    out, err = job.open(3, Std.OUT), job.open(3, Std.ERR)
    assert not os.get_inheritable(out)
    os.write(out, b"one\ntw")
    os.write(err, b"warning\n")
    assert pipe.now() == b"[3] one\n"

    os.write(out, b"o\n")
    assert pipe.now() == b"[3] one\n[3] two\n"
    assert err_pipe.now() == b"[3] warning\n"
    assert job.file("3-OUT.log") == b"one\ntwo\n"
    assert job.file("3-ERR.log") == b"warning\n"
    assert (job.directory / "3-OUT.log").stat().st_mode & 0o777 == 0o600


def test_real_ranks_write_line_by_line(job: Job, pipe: Any, loop: Any) -> None:
    code = "import os, sys\nfor n in range(2000): os.write(1, b'rank %s line %d\\n' % (sys.argv[1].encode(), n))"
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(6):
        end = job.open(rank)
        ranks.append(subprocess.Popen([sys.executable, "-S", "-c", code, str(rank)], stdout=end))
        job.hand_over(end)
    pipe.until(lambda data: data.count(b"\n") == 12_000)
    for process in ranks:
        assert process.wait() == 0

    for rank in range(6):
        said = [b"rank %d line %d" % (rank, number) for number in range(2000)]
        shown = [line.partition(b" ")[2] for line in pipe.data.splitlines() if line.startswith(b"[%d] " % rank)]
        assert said == shown
        assert said == job.file(f"{rank}-OUT.log").splitlines()


pieces = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"step", b"\x1b[31m", b"\xff\x00", b"x" * 300]), max_size=30)
writes = st.lists(st.tuples(st.integers(0, 2), pieces.map(b"".join)), max_size=20)


@settings(deadline=None, max_examples=60)
@given(writes)
def test_any_bytes_in_any_chunks_off_a_terminal(
    tmp_path_factory: pytest.TempPathFactory, said: list[tuple[int, bytes]]
) -> None:
    from gpulaunch.launcher.loop.loop import Loop

    loop = Loop()
    directory = tmp_path_factory.mktemp("job")
    page = directory / "page"
    with page.open("wb") as out:
        console = Console(loop, stdout_fd=out.fileno(), stderr_fd=out.fileno())
        hub = LogHub(loop, console)
        ends = [
            hub.open(rank=rank, local_rank=rank, stream=Std.OUT, path=str(directory / str(rank)), show=True)
            for rank in range(3)
        ]
        for rank, data in said:
            if data:
                os.write(ends[rank], data)
                loop.turn(0)
        for rank, end in enumerate(ends):
            os.close(end)
            hub.finish(rank)
        hub.close()
        console.close()
    loop.close()

    shown = page.read_bytes()
    assert shown == b"" or shown.endswith(b"\n")
    for rank in range(3):
        stream = b"".join(data for who, data in said if who == rank)
        assert (directory / str(rank)).read_bytes() == stream
        expected = stream.split(b"\n")
        if not expected[-1]:
            expected.pop()  # the stream ended with a newline
        assert expected == [line[4:] for line in shown.split(b"\n") if line.startswith(b"[%d] " % rank)]


def test_lines_of_300_characters_without_newline_come_whole(job: Job, pipe: Any) -> None:
    end = job.open(0)
    os.write(end, b"x" * 300)
    assert pipe.now() == b""

    job.hand_over(end)
    assert pipe.now() == b"[0] " + b"x" * 300 + b"\n"
    assert job.file("0-OUT.log") == b"x" * 300


def test_ten_megabytes_without_newline(job: Job, pipe: Any, loop: Any) -> None:
    size = 10_000_000
    end = job.open(0)
    code = f"import os\nleft = {size}\nwhile left: left -= os.write(1, b'y' * min(left, 1 << 20))\nos.write(1, b'\\n')"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=end) as rank:
        job.hand_over(end)
        pipe.until(lambda _: job.hub.num_open == 0 and pipe.data.count(b"y") == size)
    assert rank.returncode == 0

    assert job.file("0-OUT.log") == b"y" * size + b"\n"
    assert pipe.now() == b"[0] " + b"y" * size + b"\n"


def test_long_lines_of_two_ranks_at_once_are_not_cut(job: Job, pipe: Any) -> None:
    first, second = job.open(0), job.open(1)
    for _ in range(8):
        os.write(first, b"a" * 30_000)
        pipe.now()
        os.write(second, b"b" * 30_000)
        pipe.now()
        job.loop.pass_time(PART_PERIOD_S / 4)
    os.write(first, b"\n")
    pipe.now()
    os.write(second, b"\n")

    assert pipe.until(lambda data: data.count(b"\n") == 2).splitlines() == [
        b"[0] " + b"a" * 240_000,
        b"[1] " + b"b" * 240_000,
    ]


def test_binary_output_passes_unchanged(job: Job, pipe: Any) -> None:
    binary = bytes(byte for byte in range(256) if byte not in b"\r\n")
    os.write(job.open(0), binary + b"\n")

    assert pipe.now() == b"[0] " + binary + b"\n"


def test_a_prefix_of_the_callers(job: Job, pipe: Any) -> None:
    os.write(job.open(2, prefix=b"[trainer2]:"), b"x\n")

    assert pipe.now() == b"[trainer2]:x\n"


def test_what_is_not_shown_is_still_kept(job: Job, pipe: Any) -> None:
    os.write(job.open(0, show=False), b"quiet\n")

    assert pipe.now() == b""
    assert job.file("0-OUT.log") == b"quiet\n"
    assert job.hub.tail(0, Std.OUT) == ["quiet"]


def test_nothing_is_ever_overwritten(job: Job) -> None:
    (job.directory / "old.log").write_bytes(b"precious")

    with pytest.raises(FileExistsError):
        job.open(0, name="old.log")
    assert job.file("old.log") == b"precious"


def test_a_second_attempt_starts_anew(job: Job, pipe: Any) -> None:
    first = job.open(0, name="first.log")
    os.write(first, b"attempt 0\n")
    job.hub.finish(0)
    second = job.open(0, name="second.log")
    os.write(second, b"attempt 1\n")
    os.write(first, b"a leftover of attempt 0\n")
    pipe.now()

    assert job.hub.tail(0, Std.OUT) == ["attempt 1"]
    assert job.file("first.log") == b"attempt 0\na leftover of attempt 0\n"
    assert job.file("second.log") == b"attempt 1\n"


# -- the end of a rank


def test_a_dead_rank_is_heard_out_though_its_child_holds_the_pipe(job: Job, pipe: Any, loop: Any) -> None:
    end = job.open(0)
    script = "sleep 300 & echo $!; echo said; printf 'last words'"
    with subprocess.Popen(["sh", "-c", script], stdout=end) as rank:
        job.hand_over(end)
    assert rank.returncode == 0

    try:
        job.hub.finish(0)  # without a turn of the loop: all of it is in the pipe
        assert job.hub.tail(0, Std.OUT)[1:] == ["said", "last words"]
        assert pipe.now().endswith(b"[0] said\n[0] last words\n")
        assert job.hub.num_open, "somebody holds it still"
    finally:
        os.kill(int(job.file("0-OUT.log").split()[0]), signal.SIGKILL)
    loop.until(lambda: not job.hub.num_open, "end of the pipe")


def test_leftovers_go_to_the_file_until_close(job: Job) -> None:
    end = job.open(0)
    os.write(end, b"dying")
    job.hub.finish(0)
    os.write(end, b", not dead")
    job.hub.close()

    assert job.file("0-OUT.log") == b"dying, not dead"
    assert job.hub.tail(0, Std.OUT) == ["dying", ", not dead"]


def test_a_leftover_that_never_stops_does_not_hold_up_finish(job: Job) -> None:
    end = job.open(0, show=False)
    with subprocess.Popen(["yes"], stdout=end) as flood:
        job.hub.finish(0)
        flood.kill()

    assert job.hub.tail(0, Std.OUT, 1) in ([], ["y"])


def test_the_tail_is_there_while_the_rank_lives(job: Job, loop: Any) -> None:
    end = job.open(0)
    os.write(end, b"".join(b"line %d\n" % number for number in range(50)) + b"\r10%\r20%")
    loop.settle()

    assert job.hub.tail(0, Std.OUT) == [f"line {number}" for number in range(31, 50)] + ["20%"]
    assert job.hub.tail(0, Std.OUT, 2) == ["line 49", "20%"]
    assert job.hub.tail(0, Std.ERR) == []
    assert job.hub.tail(7, Std.OUT) == []


# -- a slow reader, or none


def test_a_slow_console_makes_ranks_wait_and_loses_nothing(job: Job, pipe: Any, loop: Any) -> None:
    num_lines = 3 * CONGESTED_BYTES // 100
    end, quiet = job.open(0), job.open(1, show=False)
    code = f"import os\nfor n in range({num_lines}): os.write(1, b'%099d\\n' % n)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=end) as rank:
        job.hand_over(end)
        loop.until(job.console.congested, "congestion")
        loop.settle()
        os.write(quiet, b"not held up\n")
        loop.settle()
        assert job.file("1-OUT.log") == b"not held up\n"
        assert rank.poll() is None
        assert len(job.file("0-OUT.log")) < CONGESTED_BYTES * 2
        late = job.open(2)  # a rank that is restarted meanwhile
        os.write(late, b"late\n")
        loop.settle()
        assert job.file("2-OUT.log") == b""

        pipe.until(lambda _: not job.console.congested() and rank.poll() == 0 and pipe.data.count(b"[0]") == num_lines)

    shown = [int(line[4:]) for line in pipe.data.splitlines() if line.startswith(b"[0] ")]
    assert shown == list(range(num_lines))
    assert len(job.file("0-OUT.log")) == num_lines * 100
    assert b"[2] late\n" in pipe.now()


def test_when_the_console_is_gone_files_go_on(job: Job, pipe: Any, err_pipe: Any, loop: Any) -> None:
    end, err = job.open(0), job.open(0, Std.ERR)
    pipe.hang_up()
    os.write(end, b"one\n")
    loop.settle()
    os.write(end, b"two\n")
    os.write(err, b"three\n")

    assert err_pipe.now().splitlines()[-1] == b"[0] three"
    assert job.file("0-OUT.log") == b"one\ntwo\n"


# -- a file that fails


def test_a_full_disk_is_told_once_and_the_console_goes_on(job: Job, pipe: Any, err_pipe: Any) -> None:
    ends = [job.open(rank) for rank in range(3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # no file of this process may be longer
    try:
        for end in ends:
            os.write(end, b"0123456789 too much\n")
        shown, told = pipe.now(), err_pipe.now().decode()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert shown.count(b" too much\n") == 3
    assert told.count("\n") == 1
    assert told.startswith(f"[gpulaunch] cannot write {job.directory}/0-OUT.log (File too large): ")
    assert job.hub.tail(0, Std.OUT) == ["0123456789 too much"]

    os.write(ends[0], b"room again\n")
    pipe.now()
    note = b"\n[gpulaunch: up to 20 bytes are missing here: File too large]\n"
    assert job.file("0-OUT.log") == b"0123456789" + note + b"room again\n"


def test_dev_null_as_a_file(job: Job, pipe: Any) -> None:
    os.write(job.open(0, name=os.devnull), b"x\n")

    assert pipe.now() == b"[0] x\n"


# -- filters


def test_duplicate_filters(loop: Any, pipe: Any, err_pipe: Any, tmp_path: Path) -> None:
    filters: dict[str, Any] = {"stdout_filters": ("loss", "acc"), "stderr_filters": ("Error",)}
    (tmp_path / "filtered_stderr.log").write_bytes(b"of an earlier attempt\n")
    job = Job(loop, pipe, err_pipe, tmp_path, **filters)
    there = str(tmp_path)
    os.write(job.open(0, filter_dir=there), b"epoch 1\nloss 2\n")
    os.write(job.open(1, prefix=b"[trainer1]:", show=False, filter_dir=there), b"acc\rlos\racc 3\nloss and acc")
    os.write(job.open(1, Std.ERR, filter_dir=there), b"ValueError: loss\nloss Error\n")
    os.write(job.open(2), b"loss of a rank that is not duplicated\n")
    loop.settle()
    job.hub.finish(1)
    job.close()

    chosen = job.file("filtered_stdout.log").splitlines()
    assert sorted(chosen) == [b"[0] loss 2", b"[trainer1]:acc", b"[trainer1]:acc 3", b"[trainer1]:loss and acc"]
    assert job.file("filtered_stderr.log") == b"of an earlier attempt\n[1] ValueError: loss\n[1] loss Error\n"


def test_filtered_lines_of_another_attempt_are_in_its_own_directory(loop: Any, pipe: Any, tmp_path: Path) -> None:
    job = Job(loop, pipe, pipe, tmp_path, stdout_filters=("loss",))
    for attempt in ("0", "1"):
        (tmp_path / attempt).mkdir()
        os.write(
            job.open(0, name=f"{attempt}/out", filter_dir=str(tmp_path / attempt)), b"loss %s\n" % attempt.encode()
        )
        loop.settle()
    job.close()

    assert [job.file(f"{attempt}/filtered_stdout.log") for attempt in "01"] == [b"[0] loss 0\n", b"[0] loss 1\n"]


# -- progress bars


def test_an_unfinished_line_is_passed_on_after_a_moment_and_goes_on_where_it_was(
    job: Job, pipe: Any, loop: Any
) -> None:
    end = job.open(0)
    os.write(end, b"loading")
    assert pipe.now() == b""

    loop.pass_time(PART_PERIOD_S)
    assert pipe.now() == b"[0] loading"
    os.write(end, b"..")
    loop.settle()
    loop.pass_time(PART_PERIOD_S)
    assert pipe.now() == b"[0] loading.."
    os.write(end, b" done\nnext\n")
    assert pipe.now() == b"[0] loading.. done\n[0] next\n"


def test_a_line_in_pieces_is_not_passed_on_for_the_time_that_another_took(job: Job, pipe: Any, loop: Any) -> None:
    """`python -u` writes print(a, b) in four pieces."""
    end, whole = job.open(0), b""
    for number in range(20):
        os.write(end, f"line {number}".encode())
        loop.settle()
        loop.pass_time(PART_PERIOD_S * 0.7)
        assert pipe.now() == whole
        os.write(end, b" ends\n")
        loop.settle()
        whole += f"[0] line {number} ends\n".encode()
        assert pipe.now() == whole
    os.write(end, b"name? ")
    loop.settle()
    loop.pass_time(PART_PERIOD_S)
    loop.pass_time(PART_PERIOD_S)
    assert pipe.now() == whole + b"[0] name? "


def test_another_rank_ends_an_unfinished_line_and_no_two_ranks_are_in_one(job: Job, pipe: Any, loop: Any) -> None:
    ends = [job.open(rank) for rank in range(2)]
    os.write(ends[0], b"name? ")
    loop.settle()
    loop.pass_time(PART_PERIOD_S)
    os.write(ends[1], b"between\n")
    loop.settle()
    os.write(ends[0], b"x\n")

    assert pipe.now() == b"[0] name? \n[1] between\n[0] x\n"
    job.console.say("of the launcher's own")


def test_nothing_before_a_carriage_return_is_dropped_off_a_terminal(job: Job, err_pipe: Any, loop: Any) -> None:
    end = job.open(0, Std.ERR)
    said = b"".join(b"\r%3d%%" % percent for percent in range(0, 101, 10)) + b"\nnext\r\n"
    for at in range(0, len(said), 7):
        os.write(end, said[at : at + 7])
        loop.settle()
        loop.pass_time(PART_PERIOD_S)

    assert err_pipe.now() == b"[0] " + said.replace(b"\nnext", b"\n[0] next")
    assert job.file("0-ERR.log") == said
    assert job.hub.tail(0, Std.ERR) == ["100%", "next"]


def test_progress_bars_of_several_ranks_off_a_terminal_come_every_few_seconds(
    job: Job, err_pipe: Any, loop: Any
) -> None:
    ends = [job.open(rank, Std.ERR) for rank in range(2)]
    for percent in range(0, 30, 10):
        for end in ends:
            os.write(end, b"\r%3d%%" % percent)
        loop.settle()
        loop.pass_time(PART_PERIOD_S)
    loop.pass_time(PROGRESS_PERIOD_S)

    bar = b"\r  0%\r 10%\r 20%"
    assert err_pipe.now() == b"[0] %s\n[1] %s" % (bar, bar)


def test_a_rank_that_prints_to_a_terminal_alone_has_a_terminal(terminal_job: Job, terminal: Any, loop: Any) -> None:
    code = (
        "import os, sys; print(sys.stdout.isatty(), sys.stderr.isatty(), *os.get_terminal_size(), flush=True);"
        "os.write(2, b'\\r 10%\\r\\x1b[1m 20%'); os.write(1, b'no newline')"
    )
    termios_size = struct.pack("HHHH", 40, 123, 0, 0)
    fcntl.ioctl(terminal.write_fd, termios.TIOCSWINSZ, termios_size)
    out, err = terminal_job.open(0, alone=True), terminal_job.open(0, Std.ERR, alone=True)
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=out, stderr=err, start_new_session=True) as rank:
        terminal_job.hand_over(out)
        terminal_job.hand_over(err)
    assert rank.returncode == 0
    terminal_job.hub.finish(0)

    shown = terminal.now()
    assert shown.startswith(b"True True 123 40\n")
    assert b"\r 10%\r\x1b[1m 20%" in shown
    assert b"no newline" in shown
    assert b"[0]" not in shown
    assert terminal_job.file("0-OUT.log") == b"True True 123 40\nno newline", "no carriage returns of a terminal's"
    assert terminal_job.file("0-ERR.log") == b"\r 10%\r\x1b[1m 20%"
    assert terminal_job.hub.tail(0, Std.OUT) == ["True True 123 40", "no newline"]
    terminal_job.console.say("the end")
    assert terminal.now().endswith(b"\n[gpulaunch] the end\n")
    loop.until(lambda: not terminal_job.hub.num_open, "the end of both")


def test_a_terminal_of_a_rank_follows_the_size_of_ours(terminal_job: Job, terminal: Any, loop: Any) -> None:
    end = terminal_job.open(0, alone=True)
    fcntl.ioctl(terminal.write_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    os.kill(os.getpid(), signal.SIGWINCH)
    loop.until(lambda: os.get_terminal_size(end) == (90, 30), "the new size")


def test_several_ranks_a_prefix_or_a_pipe_make_no_terminal(terminal_job: Job, job: Job, tmp_path: Path) -> None:
    ends = [
        terminal_job.open(0),
        terminal_job.open(1, alone=True, prefix=b"[trainer1]:"),
        terminal_job.open(2, alone=True, show=False),
        job.open(3, alone=True),
    ]

    assert not any(map(os.isatty, ends))


def test_megabytes_through_a_terminal_come_whole(terminal_job: Job, terminal: Any) -> None:
    end = terminal_job.open(0, alone=True)
    code = "import os\nfor n in range(20000): os.write(1, b'%099d\\n' % n)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=end) as rank:
        terminal_job.hand_over(end)
        terminal.until(lambda data: len(data) == 2_000_000 and not terminal_job.hub.num_open)
    assert rank.returncode == 0

    assert terminal.data == terminal_job.file("0-OUT.log") == b"".join(b"%099d\n" % n for n in range(20000))


def test_progress_bars_on_a_terminal(terminal_job: Job, terminal: Any, loop: Any) -> None:
    ends = [terminal_job.open(rank, Std.ERR) for rank in range(2)]
    for percent in range(0, 50, 10):
        for end in ends:
            os.write(end, b"\r%3d%%|%s" % (percent, b"#" * percent))
        loop.settle()
    assert terminal.now() == b"", "no faster than a few times a second"

    loop.pass_time(LIVE_PERIOD_S)
    assert terminal.screen() == ["[0]  40%|" + "#" * 40]
    os.write(terminal_job.open(0), b"between\n")
    loop.settle()
    loop.pass_time(1.0)
    assert terminal.screen() == ["[0] between", "[0]  40%|" + "#" * 40]

    for end in ends:
        os.write(end, b"\r100%\n")
    loop.settle()
    assert terminal.screen() == ["[0] between", "[0-1] 100%", ""]


def test_a_bar_of_a_rank_that_dies_stays_on_the_terminal(terminal_job: Job, terminal: Any, loop: Any) -> None:
    os.write(terminal_job.open(0, Std.ERR), b"\r 10%\r 20%")
    loop.settle()
    loop.pass_time(LIVE_PERIOD_S)
    terminal_job.hub.finish(0)

    assert terminal.screen() == ["[0]  20%", ""]


def test_ranks_fold_on_a_terminal_and_the_dead_are_not_waited_for(terminal_job: Job, terminal: Any, loop: Any) -> None:
    ends = [terminal_job.open(rank) for rank in range(4)]
    for end in ends:
        os.write(end, b"same\n")
    loop.settle()
    assert terminal.screen() == ["[0-3] same", ""]

    terminal_job.hub.finish(1)
    for end in (ends[0], ends[2], ends[3]):
        os.write(end, b"we three\n")
    assert terminal.screen() == ["[0-3] same", "[0,2-3] we three", ""]


# -- the whole of it


def test_the_benchmark_counts_every_line() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "logs.py"
    for console in ("pipe", "tty"):
        command = [sys.executable, str(script), "--ranks", "4", "--lines", "40000", "--console", console]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=100)
