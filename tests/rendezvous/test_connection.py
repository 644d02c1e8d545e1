"""Lines between agents: whatever comes, it is one of our messages or it is refused, and nothing blocks or grows."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.rendezvous.connection import Connection
from gpulaunch.launcher.rendezvous.messages import (
    MAX_LINE_BYTES,
    Beat,
    Bye,
    Challenge,
    MessageError,
    Planned,
    Refused,
    Register,
    Reported,
    VersionError,
    clean,
    decode,
    encode,
)
from gpulaunch.launcher.rendezvous.plan import NodeState, Offer, Plan, Report, Seat, Stage

number = st.integers(0, 2**31 - 1)
text = st.text(max_size=700).map(clean)
reports = st.builds(
    Report,
    node=text,
    host=text,
    order=st.none() | number,
    nproc=number,
    state=st.sampled_from(NodeState),
    offers=st.tuples(st.builds(Offer, key=text, generation=number, step=number)),
)
seats = st.builds(Seat, node=text, host=text, node_rank=number, nproc=number, first_rank=number)
plans = st.builds(Plan, job=text, stage=st.sampled_from(Stage), generation=number, seats=st.tuples(seats), why=text)
messages = st.one_of(
    st.builds(Register, run_id=text, min_nodes=number, max_nodes=number, max_restarts=number),
    st.builds(Refused, why=text),
    st.builds(Challenge, nonce=text),
    st.builds(Reported, report=reports),
    st.builds(Planned, host=text, plan=plans, port=number),
    st.builds(Beat, number=number),
    st.builds(Bye),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@given(messages)
def test_what_is_said_is_what_is_heard(message: Any) -> None:
    line = encode(message)

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert len(line) <= MAX_LINE_BYTES
    assert decode(line) == message


@given(st.binary(max_size=200))
def test_garbage_is_refused(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode(line)


@given(messages, st.data())
def test_a_field_of_another_type_is_refused(message: Any, data: st.DataObject) -> None:
    said = json.loads(encode(message))
    field = data.draw(st.sampled_from(sorted(said)))
    value = data.draw(json_values)
    said[field] = value
    try:
        heard = decode(json.dumps(said).encode())
    except MessageError:
        return
    for name, kept in vars(heard).items():
        assert type(kept) is type(vars(message)[name]), "only a value of the same type gets through"


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 12_000,
        b'{"gpulaunch": 3, "say": "beat", "number": ' + b"9" * 5_000 + b"}",
        b'{"gpulaunch": 3, "say": "beat", "number": -1}',
        b'{"gpulaunch": 3, "say": "beat", "number": true}',
        b'{"gpulaunch": 3, "say": "beat", "number": NaN}',
        b'{"gpulaunch": 3, "say": "refused"}',
        b'{"gpulaunch": 3, "say": ["beat"]}',
        b'{"gpulaunch": 3, "say": "format_disk"}',
        b"null",
        b"",
    ],
    ids=["deep", "long number", "negative", "bool", "nan", "missing", "list", "unknown", "null", "empty"],
)
def test_hostile_lines_are_refused(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode(line)


def test_another_version_is_named() -> None:
    with pytest.raises(VersionError, match="speaks version 4 of the protocol, not 3"):
        decode(b'{"gpulaunch": 4, "say": "hello", "token": "x"}')


def test_fields_of_a_later_release_are_left_alone() -> None:
    assert decode(b'{"gpulaunch": 3, "say": "beat", "number": 3, "more": [1]}') == Beat(number=3)


def test_text_from_outside_cannot_move_the_cursor() -> None:
    why = "\x1b[2J\x07gone\r\n\ud800"

    heard = decode(json.dumps({"gpulaunch": 3, "say": "refused", "why": why}).encode())

    assert isinstance(heard, Refused)
    assert heard.why == "?[2J?gone???"
    heard.why.encode("utf-8")


class End:
    """One end of a connection, with what came in."""

    def __init__(self, turning: Any) -> None:
        self.far, self.near = socket.socketpair()
        self.messages: list[Any] = []
        self.ends: list[str] = []
        self.connection = Connection(turning.loop, self.near, on_message=self.messages.append, on_end=self.ends.append)

    def close(self) -> None:
        self.connection.close()
        self.far.close()


@pytest.fixture
def end(turning: Any) -> Iterator[End]:
    end = End(turning)
    yield end
    end.close()


def test_lines_may_come_in_any_pieces(turning: Any, end: End) -> None:
    said = encode(Beat(number=1)) + encode(Bye()) + encode(Beat())
    for byte in said:
        end.far.send(bytes([byte]))
        turning.loop.turn(0.01)

    turning.until(lambda: len(end.messages) == 3)
    assert end.messages == [Beat(number=1), Bye(), Beat()]
    assert end.ends == []


def test_words_said_before_the_end_are_heard_before_it(turning: Any, end: End) -> None:
    end.far.sendall(encode(Refused(why="rank 5 failed")))
    end.far.close()

    turning.until(lambda: end.ends)
    assert end.messages == [Refused(why="rank 5 failed")]
    assert end.ends == ["connection closed"]


@pytest.mark.parametrize(
    "garbage",
    [b"\x09\x00\x00\x00", b"GET / HTTP/1.1\r\n\r\n", b"{" + b"x" * MAX_LINE_BYTES, b"{}\n", b"\n"],
    ids=["torch store", "http", "endless line", "empty object", "empty line"],
)
def test_a_stranger_is_recognised_without_waiting(turning: Any, end: End, garbage: bytes) -> None:
    end.far.sendall(garbage)

    turning.until(lambda: end.ends)
    assert end.ends == ["not gpulaunch"]
    assert end.messages == []


def test_one_who_reads_nothing_costs_bounded_memory(turning: Any, end: End) -> None:
    for _ in range(20_000):
        end.connection.send(Refused(why="x" * 500))

    assert end.connection.unsent_bytes < 1024 * 1024
    assert end.ends == []


def test_a_full_pipe_is_continued_when_it_drains(turning: Any, end: End) -> None:
    """Control: nothing is lost or doubled while the bound is not reached."""
    end.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    said = [Beat(number=number) for number in range(2_000)]
    for message in said:
        end.connection.send(message)
    assert end.connection.unsent_bytes, "the pipe should have filled up"
    end.far.setblocking(False)
    heard = b""

    def drained() -> bool:
        nonlocal heard
        try:
            heard += end.far.recv(65536)
        except BlockingIOError:
            pass
        return heard.count(b"\n") == len(said)

    turning.until(drained)
    assert [decode(line) for line in heard.splitlines()] == said


def test_an_owner_may_close_while_being_called(turning: Any) -> None:
    far, near = socket.socketpair()
    heard: list[Any] = []
    ends: list[str] = []
    connection: Connection

    def take(message: Any) -> None:
        heard.append(message)
        connection.close()

    connection = Connection(turning.loop, near, on_message=take, on_end=ends.append)
    with far:
        far.sendall(encode(Beat()) + encode(Beat()))
        turning.until(lambda: heard)
        turning.for_s(0.05)

    assert heard == [Beat()]
    assert ends == []


@pytest.mark.parametrize(
    "line",
    [
        '{"gpulaunch": 3, "say": "reported", "report": {"node": "n", "host": "h", "nproc": 1, "cause": '
        '{"text": "", "tier": 0, "age_s": 1' + "0" * 400 + "}}}",
        '{"gpulaunch": 3, "say": "reported", "report": {"node": "n", "host": "h", "nproc": 1, "state": []}}',
        '{"gpulaunch": 3, "say": "reported", "report": {"node": "n", "host": "h", "nproc": 1e999}}',
        '{"gpulaunch": 3, "say": "reported", "report": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
    ids=["a number without end", "no state", "no number", "lists without end"],
)
def test_values_that_no_report_has_are_no_message(line: str) -> None:
    with pytest.raises(MessageError):
        decode(line.encode())
