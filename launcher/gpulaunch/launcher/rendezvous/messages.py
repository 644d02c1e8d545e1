"""Messages between the agents of one job: JSON lines.

Every line is one object with the protocol's version and a type: `{"gpulaunch": 2, "say": "ready", "attempt": 0}`.

    follower -> leader   hello, ready, ended
    leader -> follower   welcome or refused, go, failed, done
    both ways            beat

Any process may connect, so input is data: checked field by field, and cleaned before it is shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

VERSION = 2  # 2: checkpoints are offered with an identity, not by name alone
MAX_TEXT = 500
# At most two texts per message, and JSON writes a character in up to 12 bytes.
MAX_LINE_BYTES = 16 * 1024
_MAX_INT = 2**31 - 1


class MessageError(Exception):
    """The input is not a gpulaunch message."""


class VersionError(MessageError):
    """The input is a message of another version of gpulaunch."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A follower registers."""

    run_id: str
    nnodes: int
    node_rank: int
    nproc: int
    host: str
    max_restarts: int


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The leader has admitted this follower, which now waits for the others."""

    host: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The leader refuses this follower, and a retry is pointless."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """No rank of an earlier attempt is alive here."""

    attempt: int
    offers: str = ""
    """Identities of the checkpoints readable here (`step 200 manifest 6f1c..:step-000000000200`), the best first, each
    ended by a bar. All nodes resume from one that they identify in the same way."""


@dataclass(frozen=True, kw_only=True)
class Go:
    """All are ready: start the ranks of this attempt."""

    attempt: int
    first_rank: int
    world_size: int
    resume: str = ""
    """The checkpoint that all resume from, as it was offered."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the attempt ended on the sender's node."""

    attempt: int
    ok: bool
    final: bool
    why: str
    preempted: bool = False
    """Not a failure: it was asked to save and end."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The attempt failed on another node; `final`: there will not be another."""

    attempt: int
    final: bool
    why: str
    preempted: bool = False
    lost: bool = False
    """A node is gone: this node cannot repair that."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """The ranks of every node have ended successfully."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Still here."""


Message = Hello | Welcome | Refused | Ready | Go | Ended | Failed | Done | Beat
_WORDS: dict[str, type[Message]] = {
    kind.__name__.lower(): kind for kind in (Hello, Welcome, Refused, Ready, Go, Ended, Failed, Done, Beat)
}


def clean(text: str) -> str:
    """`text` made safe to show and compare: bounded, and without control characters that move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT])


def encode(message: Message) -> bytes:
    """One line, newline included."""
    said = {name: clean(value) if isinstance(value, str) else value for name, value in vars(message).items()}
    return json.dumps({"gpulaunch": VERSION, "say": type(message).__name__.lower(), **said}).encode("ascii") + b"\n"


def decode(line: bytes) -> Message:
    """The message in `line`. Raises MessageError for anything else; unknown fields are ignored."""
    try:
        said: object = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise MessageError("not JSON") from err
    if not isinstance(said, dict) or "gpulaunch" not in said:
        raise MessageError("not a message of gpulaunch")
    if said["gpulaunch"] != VERSION:
        spoken = clean(str(said["gpulaunch"]))[:20]
        raise VersionError(f"speaks version {spoken} of the protocol, not {VERSION}")
    word = said.get("say")
    kind = _WORDS.get(word) if isinstance(word, str) else None
    if kind is None:
        raise MessageError("an unknown word")
    values: dict[str, Any] = {
        field.name: _checked(said.get(field.name, field.default), str(field.type)) for field in fields(kind)
    }
    return kind(**values)


def _checked(value: object, kind: str) -> object:
    """`value`, if it is of the type that the field's annotation names; bool is not int here."""
    if type(value).__name__ != kind:
        raise MessageError(f"{kind} expected")
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, int) and not 0 <= value <= _MAX_INT:
        raise MessageError("number out of range")
    return value
