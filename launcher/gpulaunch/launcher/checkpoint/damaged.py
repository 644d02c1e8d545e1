"""The exceptions of all checks of this package, in a separate module: the agent needs them but none of the checks."""

from __future__ import annotations

_WHY_CAP = 300


class Damaged(Exception):  # noqa: N818 - a finding about a file, not a fault
    """Why a checkpoint, or a part of one, is not complete, as one phrase.

    It may quote names from a damaged file: characters that do not print in one terminal line are replaced.
    """

    def __init__(self, why: str) -> None:
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in why[:_WHY_CAP]))


class OutOfTimeError(Exception):
    """The time for reading file contents is over."""
