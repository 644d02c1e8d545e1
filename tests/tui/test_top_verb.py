"""`gpulaunch top`: which run is meant, what is printed once, and what is said when there is no Textual."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from runs_on_disk import whole

from gpulaunch.exporters.tui.tail import LogPlace, read_tail
from gpulaunch.exporters.view.as_json import from_json
from gpulaunch.exporters.view.model import Status
from gpulaunch.exporters.view.text import inert
from gpulaunch.launcher.cli import top
from gpulaunch.launcher.job.options import UsageError

WAIT_S = 60.0


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpulaunch-runs").mkdir()
    return tmp_path


def a_run(cwd: Path, name: str, *, at_s: int) -> Path:
    run_dir = whole(cwd / "gpulaunch-runs" / name, 30)
    os.utime(run_dir / "job.json", (at_s, at_s))
    return run_dir


# -- which run


def test_the_newest_run_is_shown_unless_one_is_named(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at_s, name in enumerate(("older", "newer")):
        a_run(cwd, name, at_s=at_s)

    assert top.run(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_dir"].endswith("newer")
    assert top.run(["--once"]) == 0
    assert "no run is active in" in capsys.readouterr().err
    assert top.run(["newer", "--once"]) == 0
    assert capsys.readouterr().err == ""
    assert top.run(["older", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_dir"].endswith("older")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no runs in .*; for a job with --job-dir, specify that directory"),
        (["nowhere"], "there is no run directory nowhere"),
        (["a", "b"], "one run at a time"),
        (["--once", "--json"], "--once or --json, not both"),
        (["--onec"], "did you mean --once"),
    ],
)
def test_wrong_words_are_told_in_one_line(cwd: Path, words: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told) as raised:
        top.run(words)

    assert "\n" not in str(raised.value)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.run(["--help"]) == 0
    assert "usage: gpulaunch top [RUN]" in capsys.readouterr().out


# -- once


def test_without_a_terminal_everything_is_printed_once(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(cwd, "job", at_s=0)

    assert top.run([]) == 0
    printed = capsys.readouterr().out

    assert "FINISHED" in printed
    assert [line for line in printed.splitlines() if line.startswith("== ")] == [
        "== ranks",
        "== findings",
        "== input",
        "== copies",
        "== memory",
        "== history",
    ]
    assert top.run(["--once"]) == 0
    assert capsys.readouterr().out == printed


def test_a_terminal_that_has_no_blocks_gets_ascii(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(cwd, "job", at_s=0)
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)

    assert top.run(["--once"]) == 0
    out.flush()

    printed = out.buffer.getvalue()  # type: ignore[attr-defined]
    assert b"#" in printed
    assert b"FINISHED" in printed


def test_the_json_is_the_view(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(cwd, "job", at_s=0)

    assert top.run(["--json"]) == 0
    view = from_json(json.loads(capsys.readouterr().out))

    assert (view.status, [rank.rank for rank in view.ranks]) == (Status.FINISHED, [0, 1])


# -- without Textual


@pytest.fixture
def without_textual(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.split(".")[0] == "textual" or name == "gpulaunch.exporters.tui.app":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)


def test_without_textual_it_says_what_to_install(
    cwd: Path, without_textual: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(cwd, "job", at_s=0)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")

    with pytest.raises(UsageError, match=r"pip install 'gpulaunch\[top\]'; or use gpulaunch top --once"):
        top.run([])


@pytest.mark.parametrize("words", [["--once"], ["--json"], []])
def test_what_is_printed_once_needs_no_textual(
    cwd: Path, without_textual: None, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(cwd, "job", at_s=0)

    assert top.run(words) == 0
    assert "finished" in capsys.readouterr().out.lower()


# -- on a terminal


class Terminal:
    """A terminal of 80x24 with `gpulaunch top` on it."""

    def __init__(self, *words: str, cwd: Path, before: str = "pass", **environment: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.modes = termios.tcgetattr(slave)
        run = "main._MODULES['top'] = 'gpulaunch.launcher.cli.top'; sys.exit(main.main(['top', *sys.argv[1:]]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; from gpulaunch.launcher.cli import main; {before}; {run}", *words],
            cwd=cwd,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **environment},
        )
        self.slave = slave
        self.seen = b""

    def until(self, text: bytes, within_s: float = WAIT_S) -> None:
        deadline_s = time.monotonic() + within_s
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"never saw {text!r} in {self.seen!r}"
            self.seen += os.read(self.master, 65536)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {}, {"TERM": "screen"}, {"TERM": "linux"}])
def test_it_runs_on_a_real_terminal_and_leaves_it_as_it_was(cwd: Path, environment: dict[str, str]) -> None:
    a_run(cwd, "job", at_s=0)
    terminal = Terminal(cwd=cwd, **environment)
    with contextlib.closing(terminal):
        terminal.until(b"FINISHED")
        terminal.until(b"PHASES")
        os.write(terminal.master, b"?")
        terminal.until(b"filter ranks")
        os.write(terminal.master, b"q")
        terminal.until(b"\x1b[?1049l")  # the screen of before is back

        assert terminal.process.wait(WAIT_S) == 0
        assert termios.tcgetattr(terminal.slave)[:4] == terminal.modes[:4]


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {}])
def test_a_fault_of_ours_is_one_line_and_the_terminal_is_as_it_was(cwd: Path, environment: dict[str, str]) -> None:
    a_run(cwd, "job", at_s=0)
    planted = "from gpulaunch.exporters.tui.widgets import RankTable; RankTable.render_line = lambda *_: 1 / 0"
    terminal = Terminal(cwd=cwd, before=planted, **environment)
    with contextlib.closing(terminal):
        terminal.until(b"details set GPULAUNCH_DEBUG=1")

        assert terminal.process.wait(WAIT_S) == 70
        assert b"internal error: ZeroDivisionError" in terminal.seen
        assert b"Traceback" not in terminal.seen
        assert b"\x1b[?1049l" in terminal.seen
        assert termios.tcgetattr(terminal.slave)[:4] == terminal.modes[:4]


# -- a real job


@pytest.mark.torch
def test_a_real_job_of_two_ranks(gpulaunch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ended = gpulaunch("--nproc", "2", "--job-dir", "job", Path(__file__).parent / "train_toy.py")
    assert ended.code == 0, ended.stderr
    run_dir = ended.cwd / "job"

    assert top.run([str(run_dir), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "FINISHED  2 ranks" in printed
    assert "200 steps" in printed
    assert "F=forward" in printed
    assert [line for line in printed.splitlines() if inert(line) != line] == []

    assert top.run([str(run_dir), "--json"]) == 0
    view = from_json(json.loads(capsys.readouterr().out))
    assert (view.status, view.steps, [rank.steps for rank in view.ranks]) == (Status.FINISHED, 200, [200, 200])

    assert view.attempt is not None
    for rank in (0, 1):
        said = read_tail(run_dir, LogPlace(node=0, attempt=view.attempt, rank=rank, stream="stderr"))
        assert f"hello from rank {rank} \\x1b]0;title\\x07" in said.lines
        said = read_tail(run_dir, LogPlace(node=0, attempt=view.attempt, rank=rank, stream="stdout"))
        assert said.lines[-1] == f"rank {rank} is done"


@pytest.mark.torch
def test_the_stack_and_a_trace_of_a_running_rank(gpulaunch: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time\n\ndef waits_here():\n    print('waiting', flush=True)\n    time.sleep(600)\n\nwaits_here()\n"
    )
    job = gpulaunch.start("--nproc", "2", "--job-dir", "job", script)
    job.wait_until(lambda run: run.stdout.count("waiting") == 2)
    run_dir = tmp_path / "job"

    said: list[str] = []
    top.Dump(run_dir, 1).run(said.append)
    told: list[str] = []
    top.trace_task(run_dir, 1).run(told.append)
    nobody: list[str] = []
    top.Dump(run_dir, 7).run(nobody.append)

    job.signal(2)
    job.wait()
    assert said[0].startswith("read by"), said
    assert any("waits_here (" in line and "train.py:5)" in line for line in said), said
    assert told[-1] == "exit code 2", told  # no step has ended: the verb says so, and top shows it
    assert "gpulaunch: error: trace:" in told[0]
    assert nobody == ["rank 7 is not on this node; its ranks are 0, 1"]


STEPS = """
import os, time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
made = 0
while not os.path.exists("stop"):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
    made += 1
    if made == 20:
        print("stepping", flush=True)
"""


@pytest.mark.torch
def test_the_key_for_a_trace_leaves_one_in_the_run_directory(gpulaunch: Any, tmp_path: Path) -> None:
    """Pressed twice, since a trace costs the job time; and the rank trains on."""
    (tmp_path / "train.py").write_text(STEPS)
    job = gpulaunch.start("--nproc", "1", "--job-dir", "job", "train.py")
    job.wait_for("stepping")

    terminal = Terminal("job", cwd=tmp_path)
    with contextlib.closing(terminal):
        terminal.until(b"RUNNING")
        terminal.until(b"PHASES")
        os.write(terminal.master, b"t")
        terminal.until(b"t once more to begin")
        assert not (tmp_path / "job" / "traces").exists()
        os.write(terminal.master, b"t")
        terminal.until(b"trace of rank 0")
        terminal.until(b" before, ", within_s=180.0)  # what it cost is told when it is there
        os.write(terminal.master, b"q")
        terminal.until(b"\x1b[?1049l")
        assert terminal.process.wait(WAIT_S) == 0

    (trace,) = (tmp_path / "job" / "traces").glob("*/rank-0.json")
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::addmm" in names
    (tmp_path / "stop").touch()
    ended = job.wait()
    assert ended.code == 0, ended


def test_a_stack_of_a_run_that_is_over_is_refused(cwd: Path) -> None:
    run_dir = a_run(cwd, "job", at_s=0)
    said: list[str] = []

    top.Dump(run_dir, 0).run(said.append)

    assert said == ["no ranks are running on this node now"] or "cannot read" in said[0], said
