"""What every check of this room says, in a module of its own: the agent needs the word and none of the checks."""

from __future__ import annotations

_WHY_CAP = 300


class Damaged(Exception):  # noqa: N818 - a finding about a file, not a fault
    """Why a checkpoint, or a part of one, is not complete: one phrase.

    It may quote names from a damaged file: what cannot be printed in a line of a terminal is replaced.
    """

    def __init__(self, why: str) -> None:
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in why[:_WHY_CAP]))


class OutOfTimeError(Exception):
    """The time for reading what files hold is over."""
