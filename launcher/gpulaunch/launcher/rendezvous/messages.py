"""Messages between the agents of one job: JSON lines.

Every line is one object with the protocol's version and a type: `{"gpulaunch": 3, "say": "beat", "number": 7}`.

    both ways            challenge, where there is a token
    node -> leader       register, reported, beat, bye
    leader -> node       refused, planned, beat

Any process may connect, so input is data: checked field by field, and cleaned before it is shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import get_args

from gpulaunch.launcher.rendezvous.codec import MessageError, clean, from_plain, to_plain
from gpulaunch.launcher.rendezvous.plan import Plan, Report

VERSION = 3  # 3: nodes with fixed ranks share a plan, too
# The longest message has about 20 texts, and JSON writes a character in up to 12 bytes.
MAX_LINE_BYTES = 128 * 1024


class VersionError(MessageError):
    """The input is a message of another version of gpulaunch."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The leader refuses this node, and a retry is pointless."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Still here."""

    number: int = 0
    """A node's own count; the leader answers with the newest one that it has received."""
    unix_s: float = 0.0
    """The leader's clock, for `gpulaunch doctor`; 0: it was not asked for."""


@dataclass(frozen=True, kw_only=True)
class Challenge:
    """The first line of both sides where there is a token; see `auth`."""

    nonce: str


@dataclass(frozen=True, kw_only=True)
class Register:
    """A node registers with the leader: what all nodes must agree on."""

    run_id: str
    min_nodes: int
    max_nodes: int
    max_restarts: int
    replicate: bool = False
    """Whether each node has a checkpoint directory of its own."""
    fixed: bool = False
    """Whether the nodes have fixed ranks."""


@dataclass(frozen=True, kw_only=True)
class Reported:
    """What a node says of itself."""

    report: Report


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A node's slice of the plan."""

    host: str
    """Of the leader."""
    plan: Plan
    port: int = 0
    """Where to dial the leader from now on; 0: where it was dialled first."""


@dataclass(frozen=True, kw_only=True)
class Bye:
    """None of this node's ranks is alive, and its agent leaves."""


Message = Refused | Beat | Challenge | Register | Reported | Planned | Bye
_WORDS: dict[str, type[Message]] = {kind.__name__.lower(): kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """One line, newline included."""
    said = {"gpulaunch": VERSION, "say": type(message).__name__.lower(), **to_plain(message)}
    return json.dumps(said).encode("ascii") + b"\n"


def decode(line: bytes, only: type[Message] | None = None) -> Message:
    """The message in `line`, of one kind if `only` that is expected. Raises MessageError for anything else; unknown
    fields are ignored."""
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
    if only is not None and kind is not only:
        raise MessageError(f"{only.__name__} expected")
    message: Message = from_plain(kind, said)
    return message
