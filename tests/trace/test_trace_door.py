"""The rank's side: when torch's client is let in, and when not. With torches that are none."""

from __future__ import annotations

import ctypes
import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulaunch.profiler.channel import tracing
from gpulaunch.profiler.probe import kineto
from gpulaunch.profiler.probe.kineto import CannotTraceError, TraceClient


def a_torch(version: str = "2.13.0+cpu", cuda: str | None = None, file: str = "/nowhere/torch/__init__.py") -> object:
    return types.SimpleNamespace(__version__=version, __file__=file, version=types.SimpleNamespace(cuda=cuda))


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which directories torch's client was started for."""
    started: list[str] = []
    monkeypatch.setattr(kineto, "start", lambda torch, directory: started.append(directory))
    return started


def test_nothing_happens_while_nobody_asks(tmp_path: Path, starts: list[str]) -> None:
    door = TraceClient(a_torch(), str(tmp_path), 0)
    for _ in range(3):
        door.look()

    assert starts == []
    assert list(tmp_path.iterdir()) == []


def test_the_client_is_let_in_once(tmp_path: Path, starts: list[str]) -> None:
    door = TraceClient(a_torch(), str(tmp_path), 0)
    Path(tracing.socket_path(str(tmp_path))).touch()
    for _ in range(3):
        door.look()

    assert starts == [str(tmp_path)]


def test_a_rank_that_cannot_be_traced_says_why_once_and_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = TraceClient(a_torch(version="2.6.0"), str(tmp_path), 3)
    Path(tracing.socket_path(str(tmp_path))).touch()
    door.look()
    assert tracing.refused(str(tmp_path), 3, os.getpid()) == "torch 2.6.0 is older than 2.7"
    assert tracing.refused(str(tmp_path), 3, os.getpid() + 1) == ""  # that was the rank of another attempt
    assert tracing.refused(str(tmp_path), 2, os.getpid()) == ""

    (tmp_path / "untraced-3").unlink()
    door.look()
    assert not (tmp_path / "untraced-3").exists()


def test_a_rank_that_cannot_even_say_so_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door = TraceClient(a_torch(version="2.6.0"), str(tmp_path), 0)
    Path(tracing.socket_path(str(tmp_path))).touch()
    monkeypatch.setattr(tracing, "refuse", lambda *_: 1 / 0)
    door.look()


@pytest.mark.parametrize("version", ["1.13.1", "2.6.0+cu124", "0", "", "unknown"])
def test_an_old_torch_is_left_alone(version: str, tmp_path: Path) -> None:
    with pytest.raises(CannotTraceError, match=r"is older than 2\.7"):
        kineto.start(a_torch(version=version), str(tmp_path))


def test_a_daemon_of_the_programs_own_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_USE_DAEMON", "1")
    with pytest.raises(CannotTraceError, match="uses its own trace daemon"):
        kineto.start(a_torch(), str(tmp_path))


def test_a_directory_that_is_too_deep_for_sockets(tmp_path: Path) -> None:
    """torch's client would write beyond the end of the address."""
    with pytest.raises(CannotTraceError, match="too long for torch's socket"):
        kineto.start(a_torch(), "/" + "d" * 54)
    with pytest.raises(CannotTraceError, match="no trace client"):
        kineto.start(a_torch(), "/" + "d" * 53)


def test_a_torch_without_the_client(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(CannotTraceError, match=r"torch 2\.13\.0\+cpu has no trace client at the expected place"):
        kineto.start(a_torch(), str(directory))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Have `libtorch_cpu.so` contain a trace client that calls this when it is started."""
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    words = (ctypes.c_void_p * 3)(1, None, 1)  # a configuration, no profiler yet, torch's side

    class Library:
        def __init__(self, begins: Callable[[], None]) -> None:
            self.begins = begins

        def __getitem__(self, symbol: str) -> Callable[[], object]:
            return self.begins if "global_kineto_init" in symbol else lambda: ctypes.addressof(words)

    return lambda begins: monkeypatch.setattr(ctypes, "PyDLL", lambda path: Library(begins))


@pytest.mark.parametrize(("cuda", "wanted"), [(None, ""), ("11.8", ""), ("12.4", ""), ("12.6", "1"), ("13.0", "1")])
def test_what_kineto_reads_is_set_for_c_alone(
    cuda: str | None, wanted: str, directory: Path, client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUPTI is let go of after a trace where that is safe."""
    said: dict[str, str] = {}
    monkeypatch.setattr(os, "putenv", said.__setitem__)
    monkeypatch.setattr(os, "unsetenv", said.__delitem__)
    before, at_start = dict(os.environ), dict[str, str]()
    client(lambda: at_start.update(said))
    kineto.start(a_torch(cuda=cuda), str(directory))

    assert (at_start["KINETO_USE_DAEMON"], at_start["KINETO_LOG_LEVEL"]) == ("1", "5")
    kept = {"KINETO_IPC_SOCKET_DIR": str(directory), "KINETO_ONDEMAND_TRACE_DIR": str(directory)}
    assert said == kept | ({"TEARDOWN_CUPTI": wanted} if wanted else {})
    assert dict(os.environ) == before


def test_what_the_user_has_set_is_kept(directory: Path, client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "0")
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    said: dict[str, str] = {}
    monkeypatch.setattr(os, "putenv", said.__setitem__)
    monkeypatch.setattr(os, "unsetenv", said.__delitem__)
    at_start: dict[str, str] = {}
    client(lambda: at_start.update(said))
    kineto.start(a_torch(cuda="13.0"), str(directory))

    assert "KINETO_USE_DAEMON" in at_start
    assert "KINETO_LOG_LEVEL" not in at_start
    assert set(said) == {"KINETO_IPC_SOCKET_DIR", "KINETO_ONDEMAND_TRACE_DIR"}
