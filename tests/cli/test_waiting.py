"""What takes longer than two seconds says so, to somebody who looks on."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

for room in ("store", "view"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))

from kept_run import state  # noqa: E402 - found by the lines above
from runs_on_disk import begin, keep  # noqa: E402

from gpulaunch.exporters.files.rows import rows_of  # noqa: E402
from gpulaunch.launcher.cli import export  # noqa: E402
from gpulaunch.launcher.cli.waiting import bar, show_activity  # noqa: E402

WAIT_S = 60.0
SLOW = """
import sys
from gpulaunch.launcher.cli.waiting import show_activity
with show_activity("reading A", patience_s=0.1, again_s=0.01) as doing:
    sys.stdin.readline()
    doing("reading B")
    sys.stdin.readline()
    doing("reading C", 0.25)
    sys.stdin.readline()
    doing("reading D", lasts_s=0.5)
    sys.stdin.readline()
print("the answer", file=sys.stderr)
"""
BLOCKS = """
import signal, sys
from gpulaunch.launcher.cli.waiting import show_activity
with show_activity("about to begin", patience_s=0.1, again_s=0.01) as doing:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    doing("busy")
    sys.stdin.readline()
    heard = signal.sigtimedwait({signal.SIGTERM}, 60)
print("heard", heard and heard.si_signo)
"""


class Terminal:
    """A program whose stderr is a terminal, and what stands there."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.screen, self.stderr = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            bufsize=0,
        )

    def goes_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def wait_for(self, text: str) -> None:
        until_s = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert select.select([self.screen], [], [], max(0.0, until_s - time.monotonic()))[0], self.shown
            self.shown += os.read(self.screen, 65536).decode()

    def ends(self) -> tuple[int, str]:
        """Wait for the end; its code, and what it has answered."""
        answer, _ = self.process.communicate(timeout=WAIT_S)
        os.close(self.stderr)
        self.stderr = -1
        with contextlib.suppress(OSError):  # when nobody has the other end any more, and all is read
            while True:
                self.shown += os.read(self.screen, 65536).decode()
        return self.process.returncode, answer.decode()

    def is_as_before(self) -> bool:
        """Whether the line is gone, and nothing else was ever written there."""
        return self.shown.endswith(" \r") and "\n" not in self.shown and "\x1b" not in self.shown

    def close(self) -> None:
        with self.process:
            self.process.kill()
        for fd in (self.screen, self.stderr):
            if fd >= 0:
                os.close(fd)


Open = Callable[..., Terminal]


@pytest.fixture
def terminal() -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(program: str, *arguments: str) -> Terminal:
        opened.append(Terminal(program, *arguments))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_on_a_terminal_it_says_what_it_does_and_wipes_it_away(terminal: Open) -> None:
    slow = terminal(SLOW)
    slow.wait_for("\rreading A, ")
    slow.goes_on()
    slow.wait_for("\rreading B, ")
    slow.goes_on()
    slow.wait_for("\rreading C [#####---------------]  25 %, ")
    slow.goes_on()
    slow.wait_for("\rreading D [####################] 100 %, ")  # and no more than that, however long it takes
    slow.goes_on()
    slow.wait_for("the answer")
    before = slow.shown.partition("the answer")[0]
    assert before.endswith(" \r"), "the line is gone when the answer comes"
    assert "\n" not in before
    assert "\x1b" not in before, "no terminal has to understand anything"


def test_what_is_quick_says_nothing(terminal: Open) -> None:
    quick = terminal(SLOW.replace("patience_s=0.1", f"patience_s={WAIT_S}"))
    for _ in range(4):
        quick.goes_on()
    quick.wait_for("the answer")
    assert quick.shown.startswith("the answer")


def test_where_nobody_looks_on_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with show_activity("reading", patience_s=0.0, again_s=0.001) as doing:
        doing("reading more")
        time.sleep(0.05)

    assert capsys.readouterr() == ("", "")


def test_a_terminal_that_takes_nothing_holds_nobody_up(terminal: Open) -> None:
    """Ctrl-S: what is written waits until somebody presses Ctrl-Q. The answer goes elsewhere, and comes."""
    stopped = terminal(SLOW.replace("file=sys.stderr", "file=sys.stdout"))
    stopped.wait_for("\rreading A, ")
    termios.tcflow(stopped.stderr, termios.TCOOFF)
    for _ in range(4):
        stopped.goes_on()
    answer, _ = stopped.process.communicate(timeout=WAIT_S)

    assert (stopped.process.returncode, answer) == (0, b"the answer\n")


def test_a_signal_that_is_blocked_waits_for_who_has_blocked_it(terminal: Open) -> None:
    """And does not come to who tells of the wait: it would be the end of the process."""
    busy = terminal(BLOCKS)
    busy.wait_for("\rbusy, ")
    busy.process.send_signal(signal.SIGTERM)
    busy.goes_on()

    assert busy.ends() == (0, f"heard {signal.SIGTERM:d}\n")


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "[--------------------]   0 %"),
        (0.07, "[#-------------------]   7 %"),
        (0.999, "[###################-]  99 %"),
        (1.0, "[####################] 100 %"),
        (1.5, "[####################] 100 %"),
        (-0.5, "[--------------------]   0 %"),
    ],
)
def test_a_bar_is_full_when_all_is_done_and_not_before(share: float, shown: str) -> None:
    assert bar(share) == shown


@pytest.mark.parametrize("verb", ["report", "compare", "flame", "top"])
def test_every_verb_that_reads_a_run_waits_like_that(verb: str) -> None:
    """By its source: what a verb does within it is in the verb's own tests."""
    from gpulaunch.launcher import cli

    assert "with show_activity(" in (Path(cli.__file__).parent / f"{verb}.py").read_text()


# --- doctor


DOCTOR = """
import sys
from gpulaunch.launcher.cli import doctor
def slow():
    sys.stdin.readline()
    return [doctor.Finding(name="tide", status=doctor.Status.OK, value="high")]
doctor.checks = lambda *_: {"the moon": list, "the tide": slow}
doctor.collectors = doctor.hooks = doctor.traces = list
sys.exit(doctor.run([]))
"""


def test_the_doctor_says_what_it_looks_at_and_how_far_it_is(terminal: Open) -> None:
    doctor = terminal(DOCTOR)
    doctor.wait_for("\rchecking the tide [####----------------]  20 %, ")
    doctor.goes_on()

    assert doctor.ends() == (0, "ok    tide  high\n1 ok, 0 warn, 0 fail\n")
    assert doctor.is_as_before()


# --- the report at the end of a run


REPORT = """
import sys
from gpulaunch.launcher.cli import report_page
report_page.WAIT_TIMEOUT_S = 60.0
report_page.ENTRY = "import os, sys, time\\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)"
print(report_page.wait(report_page.begin(sys.argv[1])))
"""


def test_the_end_of_a_run_says_that_it_waits_for_the_report(terminal: Open, tmp_path: Path) -> None:
    run = terminal(REPORT, str(tmp_path / "written"))
    run.wait_for("\rwriting report.html, ")
    (tmp_path / "written").touch()

    assert run.ends() == (0, "True\n")
    assert run.is_as_before()


# --- chaos


CHAOS = "import sys; from gpulaunch.launcher.cli import chaos; sys.exit(chaos.run(sys.argv[1:]))"
AGENT = "import os, sys, time\nfd = os.open(sys.argv[1], os.O_RDONLY)\nprint('held', flush=True)\ntime.sleep(600)"


class Toy:
    """A run of one agent, which holds the directory, and one rank, which sleeps; and what the agent has written."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        run_dir.mkdir()
        (run_dir / "events.jsonl").touch()
        self.agent = subprocess.Popen([sys.executable, "-c", AGENT, str(run_dir)], stdout=subprocess.PIPE)
        assert self.agent.stdout is not None
        assert self.agent.stdout.readline() == b"held\n"
        self.rank = subprocess.Popen(["sleep", "600"], env={**os.environ, "GPULAUNCH_RUNS": "ab"})
        self.write(ranks=[{"rank": 1, "local_rank": 0, "pid": self.rank.pid}])

    def write(self, **told: object) -> None:
        group = {"version": 1, "run_id": "ab", "attempt": 0, "ranks": [], "agent_pid": self.agent.pid, **told}
        (self.run_dir / "new").write_text(json.dumps(group))
        (self.run_dir / "new").replace(self.run_dir / "group.json")

    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.rank.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def close(self) -> None:
        for process in (self.rank, self.agent):
            process.kill()
            process.communicate()


@pytest.fixture
def toy(tmp_path: Path, census: None) -> Iterator[Toy]:
    toy = Toy(tmp_path / "toy")
    yield toy
    toy.close()


def test_chaos_says_how_long_it_is_until_its_fault(terminal: Open, toy: Toy) -> None:
    chaos = terminal(CHAOS, "kill-rank", "1", "--after", "1000s", "--job-dir", str(toy.run_dir))
    chaos.wait_for("\rkill-rank is next [")
    toy.agent.kill()

    code, answer = chaos.ends()
    assert (code, answer[9:]) == (1, "kill-rank: the run has ended; 0 of 1 faults were tried\n")
    assert chaos.is_as_before()


def test_chaos_says_that_there_are_no_ranks_yet(terminal: Open, toy: Toy) -> None:
    toy.write(ranks=[])
    chaos = terminal(CHAOS, "kill-rank", "1", "--seed", "5", "--job-dir", str(toy.run_dir))
    chaos.wait_for("\rlooking for the ranks, ")
    toy.write(ranks=[{"rank": 1, "local_rank": 0, "pid": toy.rank.pid}])

    code, answer = chaos.ends()
    assert (code, answer[9:]) == (0, f"kill-rank: SIGKILL to rank 1, pid {toy.rank.pid} (attempt 0, seed 5)\n")
    assert chaos.is_as_before()


def test_chaos_says_how_long_a_rank_is_slowed_and_still_hears_when_it_is_told_to_end(terminal: Open, toy: Toy) -> None:
    """A stopped rank must not stay stopped."""
    chaos = terminal(CHAOS, "slow-rank", "1", "--for", "1000s", "--job-dir", str(toy.run_dir))
    chaos.wait_for("\rinjecting slow-rank [")
    chaos.process.send_signal(signal.SIGTERM)

    code, answer = chaos.ends()
    assert (code, "slowed rank 1" in answer) == (128 + signal.SIGTERM, True)
    assert chaos.is_as_before()
    assert not toy.is_stopped()


# --- export


EXPORT = """
import sys, time
from gpulaunch.exporters.files import rows
from gpulaunch.launcher.cli import export
real = rows.rows_of
def slow(*words, **named):
    sys.stdin.readline()
    for number, row in enumerate(real(*words, **named), 1):
        if number == 10_001:
            time.sleep(2.5)
        yield row
rows.rows_of = slow
sys.exit(export.run(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty minutes: half of them, the newest, by the second, which is most of the rows; the rest by 10 s."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    begin(run_dir)
    keep(run_dir, (state(float(second)) for second in range(1, 1200)))
    return run_dir


def test_an_export_says_that_it_reads_and_then_how_much_it_has_written(
    terminal: Open, kept: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    written = terminal(EXPORT, str(kept), "--out", str(out), "--every", "10s")
    written.wait_for("\rreading the run, ")
    written.goes_on()

    code, answer = written.ends()
    assert (code, answer.startswith(f"{len(out.read_text().splitlines()) - 1:,} rows in ")) == (0, True)
    (first, *_) = re.findall(r"\r10,000 rows \[[#-]{20}\] +(\d+) %", written.shown)
    assert 0 < int(first) < 100
    assert written.shown.endswith(" \r")


def test_how_much_is_written_is_told_by_how_fine_the_samples_are(kept: Path) -> None:
    """By their time alone it would be half of it before the fine ones begin, of which most rows are."""
    extent = export.Extent(kept, every_s=0.0)
    rows = list(rows_of(kept, notes=[]))
    shares = [extent.share_of(row) for row in rows]
    samples = [share for share in shares if share is not None]

    assert samples == sorted(samples)
    assert len(samples) > 0.95 * len(rows)
    assert 0.0 <= samples[0] < 0.05
    assert samples[-1] == 1.0
    for part in (0.25, 0.5, 0.75):
        assert abs(samples[round(part * len(samples))] - part) < 0.1
