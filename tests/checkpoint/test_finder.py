"""The search in a child of the agent: its answer on the loop, its end whatever happens."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulaunch.launcher.checkpoint import files
from gpulaunch.launcher.checkpoint import find as search_module
from gpulaunch.launcher.checkpoint.find import Search, find
from gpulaunch.launcher.checkpoint.finder import Finder, SearchRequest
from gpulaunch.launcher.loop import child, linux
from gpulaunch.launcher.loop.loop import Loop

PATIENCE_S = 30.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def answer(loop: Loop, finder: Finder, ask: SearchRequest) -> Search:
    """Search, and turn until it has answered."""
    answers: list[Search] = []
    finder.start(ask, answers.append)
    late = loop.call_at(loop.now() + PATIENCE_S, lambda: pytest.fail("no answer"))
    while not answers:
        loop.turn()
    late.cancel()
    assert finder.pid is None
    return answers[0]


def until_gone(loop: Loop, pid: int) -> None:
    deadline_s = loop.now() + PATIENCE_S
    while linux.state_of(pid) != "":
        loop.turn(0.05)
        assert loop.now() < deadline_s


@pytest.mark.torch
def test_it_answers_as_find_does(loop: Loop, put: Callable[..., Path], tmp_path: Path) -> None:
    root = put("dcp", "run/step_1", "run/step_2").parent
    (root / "step_2/__0_0.distcp").unlink()
    expected = find([str(root)])
    finder = Finder(loop)

    assert expected.found
    assert expected.skipped
    assert answer(loop, finder, SearchRequest(where=(str(root),))) == expected
    assert answer(loop, finder, SearchRequest(where=(str(root), "nonsense://x"), limit=0)).error.startswith(
        "nonsense://x cannot"
    )
    named = answer(loop, finder, SearchRequest(named=str(root / "step_1"), memory=str(tmp_path / "verified.json")))
    assert [one.path for one in named.found] == [str(root / "step_1")]
    refused = answer(loop, finder, SearchRequest(named=str(root / "step_2")))
    assert [(one.path, one.why) for one in refused.skipped] == [(str(root / "step_2"), "__0_0.distcp is missing")]


@pytest.mark.torch
def test_it_searches_remote_storage(loop: Loop, put: Callable[..., Path]) -> None:
    pytest.importorskip("fsspec")
    root = put("new.pt", "run/model_1.pt").parent

    search = answer(loop, Finder(loop), SearchRequest(where=(f"file://{root}",)))

    assert [one.path for one in search.found] == [f"file://{root}/model_1.pt"]


def test_an_answer_larger_than_a_pipe_arrives_whole(loop: Loop, tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / f"model_{number}.pt").touch()

    search = answer(loop, Finder(loop), SearchRequest(where=(str(tmp_path),)))

    assert len(search.skipped) == 2000


def never_answers(where: object, **_: object) -> Search:
    signal.pause()
    return Search()


def test_a_search_that_takes_too_long_is_ended_and_said(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "find", never_answers)

    search = answer(loop, Finder(loop), SearchRequest(where=("/x",), timeout_s=0.2))

    assert search.found == ()
    assert search.error.startswith("the search for a checkpoint timed out after 0 s")


def test_a_cancelled_search_is_gone_and_never_answers(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    finder = Finder(loop)
    with monkeypatch.context() as patched:
        patched.setattr(search_module, "find", never_answers)
        finder.start(SearchRequest(where=("/x",), timeout_s=0.3), lambda _: pytest.fail("answered"))
    pid = finder.pid
    assert pid is not None

    finder.cancel()
    finder.cancel()

    assert finder.pid is None
    until_gone(loop, pid)
    # The timer of the first must not end the second.
    assert answer(loop, finder, SearchRequest(where=("/gone",))) == Search()


def test_a_search_that_cannot_be_started_is_said(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_processes() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_more_processes)

    search = answer(loop, Finder(loop), SearchRequest(where=("/x",)))

    assert search.error == "cannot start the search for a checkpoint: Resource temporarily unavailable"


def test_a_child_that_is_killed_or_fails_is_said(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "find", lambda where, **_: os.kill(os.getpid(), signal.SIGKILL))
    finder = Finder(loop)
    assert "ended with signal 9 before it had a result" in answer(loop, finder, SearchRequest(where=("/x",))).error

    def out_of_memory(where: object, **_: object) -> Search:
        raise MemoryError

    monkeypatch.setattr(search_module, "find", out_of_memory)
    assert answer(loop, finder, SearchRequest(where=("/x",))).error.startswith(
        "the search for a checkpoint failed: MemoryError"
    )


def test_the_child_has_nothing_of_the_agents(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No descriptor, handler or cleanup; it says nothing on the agent's output."""
    report = tmp_path / "report"
    loop.on_signal(signal.SIGTERM, lambda _: pytest.fail("the child's signal reached the agent"))

    def look(where: object, **_: object) -> Search:
        os.write(1, b"noise")
        os.kill(os.getpid(), signal.SIGTERM)  # ignored: a terminal's Ctrl-C is the agent's business
        open_fds = [fd for fd in range(3, 200) if os.path.exists(f"/proc/self/fd/{fd}")]
        handlers = [one for one in signal.valid_signals() if callable(signal.getsignal(one))]
        report.write_text(repr((open_fds, handlers)))
        return Search()

    monkeypatch.setattr(search_module, "find", look)
    assert answer(loop, Finder(loop), SearchRequest(where=("/x",))) == Search()
    assert report.read_text() == "([3], [])"
    assert capfd.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)


def test_the_child_dies_with_the_agent(loop: Loop) -> None:
    program = """
import os, signal, sys
from gpulaunch.launcher.checkpoint import find
from gpulaunch.launcher.checkpoint.finder import Finder, SearchRequest
from gpulaunch.launcher.loop.loop import Loop
def block(where, **_):
    signal.pause()
find.find = block
loop = Loop()
finder = Finder(loop)
finder.start(SearchRequest(where=("/x",)), print)
print(finder.pid, flush=True)
loop.run()
"""
    read, write = os.pipe()
    agent = child.start([sys.executable, "-c", program], os.environ, stdout_fd=write)
    os.close(write)
    with os.fdopen(read) as told:
        pid = int(told.readline())
    assert linux.state_of(pid) != ""

    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)

    until_gone(loop, pid)


def test_the_agents_imports_stay_light() -> None:
    """What the agent imports of this package must not bring what the search needs."""
    program = """
import sys
import gpulaunch.launcher.checkpoint.finder, gpulaunch.launcher.checkpoint.resume
heavy = {"torch", "fsspec", "hashlib", "zipfile", "zlib", "pickle", "pickletools", "shlex", "fnmatch",
         "gpulaunch.launcher.checkpoint.formats"}
print(sorted(heavy & set(sys.modules)))
"""
    read, write = os.pipe()
    pid = child.start([sys.executable, "-I", "-c", program], os.environ, stdout_fd=write)
    os.close(write)
    with os.fdopen(read) as told:
        said = told.read()
    os.waitpid(pid, 0)
    assert said == "[]\n"


def test_what_reads_while_the_ranks_train_stays_behind_them(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(_where: object, **_options: object) -> Search:
        return Search(error=f"{os.nice(0)} {files.MAX_THREADS}")

    monkeypatch.setattr(search_module, "find", told)

    assert answer(loop, Finder(loop), SearchRequest()).error == f"{os.nice(0)} 8"
    assert answer(loop, Finder(loop), SearchRequest(is_behind=True)).error == "19 2"
