"""The daemon's side of Kineto's protocol, with a client that speaks as torch's does."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_client import BUSY, Client

from gpulaunch.profiler.daemon.kineto import WHAT, ClientRequest, Daemon, frame, order, parse


def nothing(_: ClientRequest) -> str:
    return ""


def test_who_asks_gets_the_order(directory: Path) -> None:
    with Daemon(str(directory)) as daemon, Client(directory) as client:
        client.ask()

        assert daemon.answer(lambda ask: "A=1\n" if ask.free else "") == [os.getpid()]
        assert client.answer() == ("req", b"A=1\n")


def test_an_empty_answer_is_an_answer_and_no_order(directory: Path) -> None:
    """The client waits for it: without one it would take the next one for it."""
    with Daemon(str(directory)) as daemon, Client(directory) as client:
        client.ask()

        assert daemon.answer(nothing) == []
        assert client.answer() == ("req", b"")


def test_a_busy_profiler_is_told_from_a_free_one(directory: Path) -> None:
    seen: list[ClientRequest] = []
    with Daemon(str(directory)) as daemon, Client(directory) as client:
        client.ask()
        client.ask(BUSY)
        daemon.answer(lambda ask: seen.append(ask) or "")

    assert seen == [ClientRequest(pid=os.getpid(), free=True), ClientRequest(pid=os.getpid(), free=False)]


def test_greetings_are_answered(directory: Path) -> None:
    with Daemon(str(directory)) as daemon, Client(directory) as client:
        client.say(b"ctxt", struct.pack("=iiq", 0, os.getpid(), 0))

        assert daemon.answer(nothing) == []
        assert client.answer() == ("ctxt", struct.pack("=i", 1))


def test_who_asks_is_known_by_the_kernel_and_not_by_what_it_says(directory: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from kineto_client import Client
with Client(Path({str(directory)!r})) as client:
    client.ask(pids=({os.getpid()},))
"""
    seen: list[int] = []
    with Daemon(str(directory)) as daemon:
        with subprocess.Popen([sys.executable, "-c", program]) as process:
            pass
        assert process.returncode == 0
        daemon.answer(lambda ask: seen.append(ask.pid) or "")

    assert seen == [process.pid]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"\0" * 40,
        frame("req", b""),
        frame("req", struct.pack("=iiq", 3, 5, 0)),  # five pids are announced, and none is there
        frame("req", struct.pack("=iiq", 3, -1, 0)),
        frame("ctxt", b""),
        frame("what", b"ever"),
        frame("req", struct.pack("=iiq", 3, 0, 0))[:-1],
    ],
)
def test_what_is_no_question_gets_no_answer(directory: Path, data: bytes) -> None:
    with Daemon(str(directory)) as daemon, Client(directory) as client:
        client.socket.sendto(data, client.daemon)
        client.ask()

        daemon.answer(nothing)
        assert client.answer() == ("req", b"")
        assert client.answer() is None


def test_who_has_no_address_or_another_place_is_not_answered(directory: Path) -> None:
    elsewhere = directory / "sub"
    elsewhere.mkdir()
    with (
        Daemon(str(directory)) as daemon,
        Client(directory, bound=False) as unbound,
        Client(elsewhere) as stranger,
    ):
        stranger.daemon = str(directory / "dynolog")
        unbound.ask()
        stranger.ask()

        assert daemon.answer(lambda _: "A=1\n") == []
        assert stranger.answer() is None


def test_a_client_that_is_gone_has_taken_no_order(directory: Path) -> None:
    with Daemon(str(directory)) as daemon, Client(directory) as client:
        client.ask()
        client.socket.close()

        assert daemon.answer(lambda _: "A=1\n") == []


def test_a_client_that_does_not_read_does_not_hold_up_the_others(directory: Path) -> None:
    with Daemon(str(directory)) as daemon, Client(directory) as deaf, Client(directory) as client:
        for _ in range(2000):
            deaf.ask()
            daemon.answer(nothing)
        client.ask()

        assert daemon.answer(lambda _: "A=1\n") == [os.getpid()]


def test_the_socket_is_the_owners_alone_and_goes_with_the_daemon(directory: Path) -> None:
    path = directory / "dynolog"
    path.write_text("left behind")
    before = os.umask(0)
    try:
        with Daemon(str(directory)):
            assert stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert not path.exists()


def test_a_path_that_is_too_long_is_an_error(directory: Path) -> None:
    deep = directory / ("d" * 100)
    deep.mkdir()
    with pytest.raises(OSError, match="too long"):
        Daemon(str(deep))


def test_the_order_is_in_the_words_of_kineto() -> None:
    text = order("/d/rank-0.part.json", start_ms=1_700_000_000_123, duration_ms=250, warmup_s=1, what=("cpu", "memcpy"))

    assert dict(line.split("=") for line in text.splitlines()) == {
        "PROFILE_START_TIME": "1700000000123",
        "ACTIVITIES_LOG_FILE": "/d/rank-0.part.json",
        "ACTIVITIES_DURATION_MSECS": "250",
        "ACTIVITIES_WARMUP_PERIOD_SECS": "1",
        "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB": "128",
        "ACTIVITY_TYPES": "cpu_op,user_annotation,gpu_memcpy,gpu_memset",
    }


def test_a_kind_that_is_in_two_words_is_named_once() -> None:
    text = order("/d/t.json", start_ms=1, duration_ms=1, warmup_s=0, what=tuple(WHAT))

    (kinds,) = [line for line in text.splitlines() if line.startswith("ACTIVITY_TYPES=")]
    assert kinds.count("gpu_memcpy") == 1


@pytest.mark.parametrize("path", ["/a=b/t.json", "/a#b/t.json", "/a\nb/t.json"])
def test_a_path_that_cannot_be_said_is_a_mistake_of_ours(path: str) -> None:
    with pytest.raises(AssertionError):
        order(path, start_ms=1, duration_ms=1, warmup_s=0, what=("cpu",))


@given(st.binary(max_size=200))
def test_any_bytes_are_understood_or_not(data: bytes) -> None:
    kind, free = parse(data)
    assert kind in ("", "ctxt", "req")
    assert not free or kind == "req"


@given(st.integers(-(2**31), 2**31 - 1), st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_every_question_is_understood(kinds: int, pids: list[int]) -> None:
    content = struct.pack(f"=iiq{len(pids)}i", kinds, len(pids), 7, *pids)

    assert parse(frame("req", content)) == ("req", bool(kinds & 2))
