"""Makes the records of what is measured in a rank. Not a test module."""

from __future__ import annotations

from typing import TypeVar

from gpulaunch.profiler.channel.declare import quantities_of

T = TypeVar("T")


def record(of: type[T], **known: object) -> T:
    """A record with these quantities; all others are 0. A new quantity changes no test that does not name it."""
    zeros = {each.name: each.value_of([0] * each.width) for each in quantities_of(of)}
    return of(**{**zeros, **known})
