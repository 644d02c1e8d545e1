"""Who has no token is not heard, whatever it sends; who has is understood."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.rendezvous.auth import Authenticator, AuthError
from gpulaunch.launcher.rendezvous.connection import Connection
from gpulaunch.launcher.rendezvous.messages import Beat, Bye, encode

TOKEN = b"a secret of sixteen bytes"
lines = st.lists(st.binary(max_size=50).filter(lambda line: b"\n" not in line), min_size=1, max_size=5)


def pair(dialled: bytes = TOKEN, accepted: bytes = TOKEN) -> tuple[Authenticator, Authenticator]:
    """Both sides of a connection, with each other's challenge."""
    one, other = Authenticator(dialled, dialled=True), Authenticator(accepted, dialled=False)
    one.begin(other.nonce)
    other.begin(one.nonce)
    return one, other


@given(lines)
def test_what_is_sealed_is_opened_in_both_directions(said: list[bytes]) -> None:
    sender, receiver = pair()
    assert [receiver.open(sender.seal(line)) for line in said] == said
    assert [sender.open(receiver.seal(line)) for line in said] == said


@given(lines, st.data())
def test_nothing_else_is_opened(said: list[bytes], data: st.DataObject) -> None:
    """A changed byte, a repeated, left out, reflected or recorded line."""
    one, other = pair()
    sealed = [one.seal(line) for line in said]
    at = data.draw(st.integers(0, len(sealed[0]) - 1))
    changed = bytearray(sealed[0])
    changed[at] ^= 1
    with pytest.raises(AuthError):
        other.open(bytes(changed))
    with pytest.raises(AuthError):  # reflected
        one.open(sealed[0])
    assert other.open(sealed[0]) == said[0]
    with pytest.raises(AuthError):  # again
        other.open(sealed[0])
    if len(said) > 2:
        with pytest.raises(AuthError):  # the second was left out
            other.open(sealed[2])
    with pytest.raises(AuthError):  # of another connection
        pair()[1].open(sealed[0])


def test_another_token_opens_nothing() -> None:
    one, other = pair(accepted=b"another of sixteen bytes")

    with pytest.raises(AuthError, match="another token"):
        other.open(one.seal(b"{}"))


class Ends:
    """Two connections that are each other's ends."""

    def __init__(self, turning: Any) -> None:
        self.turning = turning
        self.heard: dict[bool, list[Any]] = {True: [], False: []}
        self.ended: dict[bool, list[str]] = {True: [], False: []}
        self.connections: dict[bool, Connection] = {}

    def connect(self, dialled: bytes | None, accepted: bytes | None) -> None:
        for is_dialled, sock, token in zip((True, False), socket.socketpair(), (dialled, accepted), strict=True):
            self.connections[is_dialled] = Connection(
                self.turning.loop,
                sock,
                on_message=self.heard[is_dialled].append,
                on_end=self.ended[is_dialled].append,
                auth=Authenticator(token, dialled=is_dialled) if token else None,
            )
        self.connections[True].send(Bye())

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


@pytest.fixture
def ends(turning: Any) -> Iterator[Ends]:
    ends = Ends(turning)
    yield ends
    ends.close()


def test_messages_wait_for_the_challenge_and_then_arrive(turning: Any, ends: Ends) -> None:
    ends.connect(TOKEN, TOKEN)

    turning.until(lambda: ends.heard[False])
    turning.until(lambda: len(ends.heard[False]) == 2 and ends.heard[True])

    assert ends.heard == {True: [Beat()], False: [Beat(), Bye()]}


@pytest.mark.parametrize(
    ("dialled", "accepted", "which", "why"),
    [
        (b"another of sixteen bytes", TOKEN, False, "has another token"),
        (b"another of sixteen bytes", TOKEN, True, "has another token"),
        (None, TOKEN, False, "gives no token"),
        (None, TOKEN, True, "asks for a token"),
        (TOKEN, None, False, "asks for a token"),
    ],
)
def test_nothing_is_heard_without_the_token(
    turning: Any, ends: Ends, dialled: bytes | None, accepted: bytes | None, which: bool, why: str
) -> None:
    ends.connect(dialled, accepted)

    turning.until(lambda: ends.ended[which])

    assert why in ends.ended[which][0] or "connection closed" in ends.ended[which][0]
    assert ends.heard == {True: [], False: []}


def test_who_records_a_connection_cannot_play_it_again(turning: Any, ends: Ends) -> None:
    """The other side's challenge is another."""
    far, near = socket.socketpair()
    heard: list[Any] = []
    ended: list[str] = []
    connection = Connection(
        turning.loop, near, on_message=heard.append, on_end=ended.append, auth=Authenticator(TOKEN, dialled=False)
    )
    challenge = json.loads(far.recv(4096))
    node = Authenticator(TOKEN, dialled=True)
    node.begin(challenge["nonce"])
    recorded = b'{"gpulaunch": 3, "say": "challenge", "nonce": "' + node.nonce.encode() + b'"}\n'
    recorded += node.seal(encode(Bye())[:-1]) + b"\n"
    far.sendall(recorded)
    turning.until(lambda: heard)
    assert heard == [Bye()]
    connection.close()
    far.close()

    far, near = socket.socketpair()
    connection = Connection(
        turning.loop, near, on_message=heard.append, on_end=ended.append, auth=Authenticator(TOKEN, dialled=False)
    )
    far.sendall(recorded)
    turning.until(lambda: ended)
    assert heard == [Bye()]
    assert ended == ["has another token; give the same --token-file on every node"]
    connection.close()
    far.close()
