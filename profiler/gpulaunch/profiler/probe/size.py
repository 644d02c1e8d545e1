"""Computes the size of a batch: samples and bytes, and how many tensors it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import chain, islice
from typing import Any, Final

_LOOK_DEEP: Final = 4
_LOOK_AT: Final = 64
"""Maximum of objects inspected in a batch: further ones of a nested batch are not part of its size."""
_COUNT: Final = 1024
"""Maximum of objects of a batch among which tensors are counted."""


def size_of(batch: Any, tensor: type[Any]) -> tuple[int, int]:
    """Samples and bytes: the first tensor's leading dimension, and all tensors in lists, tuples, mappings; 0 if none.

    It inspects a few levels, and the first `_LOOK_AT` objects.
    """
    kind = type(batch)
    items = batch.values() if kind is dict else batch if kind is list or kind is tuple else ()
    if 0 < len(items) <= _LOOK_AT:  # the result of default_collate; much faster than a full inspection
        samples = size_bytes = 0
        try:
            for item in items:
                if type(item) is not tensor:
                    break
                size_bytes += item.nbytes
                if not samples:
                    shape = item.shape
                    samples = shape[0] if shape else 0
            else:
                return samples, size_bytes
        except RuntimeError:
            pass  # sparse: it has no such size
    return _Look(tensor).around(batch)


def tensors_in(batch: Any, tensor: type[Any]) -> int:
    """The number of tensors in lists, tuples and mappings, a few levels deep, of the first `_COUNT` objects."""
    found, left, layer = 0, _COUNT, [batch]
    for _ in range(_LOOK_DEEP + 1):
        left -= len(layer)
        found += sum(isinstance(thing, tensor) for thing in layer)
        layer = list(islice(chain.from_iterable(map(_inside, layer)), left))
    return found


def _inside(thing: Any) -> Iterable[Any]:
    """What is in a list, tuple or mapping; nothing in anything else."""
    if isinstance(thing, (list, tuple)):
        return thing
    return thing.values() if isinstance(thing, Mapping) else ()


class _Look:
    """One inspection of a batch."""

    __slots__ = ("_left", "_samples", "_size_bytes", "_tensor")

    def __init__(self, tensor: type[Any]) -> None:
        self._tensor = tensor
        self._left = _LOOK_AT
        self._samples = self._size_bytes = 0

    def around(self, batch: Any) -> tuple[int, int]:
        self._at(batch, _LOOK_DEEP)
        return self._samples, self._size_bytes

    def _at(self, thing: Any, depth: int) -> None:
        self._left -= 1
        if isinstance(thing, self._tensor):
            with suppress(RuntimeError):  # a sparse one has no such size
                self._size_bytes += int(thing.nbytes)
            if not self._samples and len(thing.shape):
                self._samples = int(thing.shape[0])
        elif depth:
            for item in _inside(thing):
                if self._left <= 0:
                    break
                self._at(item, depth - 1)
