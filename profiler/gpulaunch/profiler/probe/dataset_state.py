"""What tells whether a dataset is changed between epochs: workers that persist would not hear of it.

Contents are compared where they can be read without running code of the program: numbers, texts, tensors and arrays of
moderate size, of which at most some bytes are looked at. Of anything else it is compared which object it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Final, NamedTuple
from zlib import crc32

from gpulaunch.profiler.probe.tensor_memory import memory_of

_MOST_WRAPPED: Final = 4
"""Datasets in each other, such as a Subset of one."""
_MOST_ATTRIBUTES: Final = 64
_MOST_TENSORS: Final = 4
"""In a tuple or list that are looked at one by one: those of a TensorDataset."""
_MOST_VALUES: Final = 256
_MOST_ITEMS: Final = 256
"""Of a list, spread over it: 30 us."""
_MOST_BYTES: Final = 1 << 24
"""Larger arrays may be files that are mapped, and reading them takes long."""
_SEEN_BYTES: Final = 1 << 14
"""Of an array, spread over it: 60 us."""


class State(NamedTuple):
    """A dataset at one moment."""

    dataset: int
    contents: tuple[object, ...]
    objects: tuple[object, ...]

    def differs(self, before: State) -> bool:
        """Whether workers with the dataset before would have other samples. A new one with the same contents is none,
        where its objects are new, too."""
        return self.contents != before.contents or (self.dataset == before.dataset and self.objects != before.objects)


def state_of(dataset: Any) -> State:
    """Read a dataset, the datasets that it wraps, and one level of the objects that they have, such as transforms."""
    values = list(islice(_values_of(dataset), _MOST_VALUES))
    contents = tuple((place, _contents_of(value)) for place, value in values)
    return State(id(dataset), contents, tuple((place, _object_of(value)) for place, value in values))


def wrapped(dataset: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield a dataset and those in it, each with the first of its attributes."""
    for _ in range(_MOST_WRAPPED):
        attributes = _attributes_of(dataset)
        yield dataset, _first_of(attributes)
        dataset = attributes.get("dataset")
        if dataset is None:
            return


def _attributes_of(thing: Any) -> dict[str, Any]:
    attributes = getattr(thing, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def _first_of(attributes: dict[str, Any]) -> dict[str, Any]:
    return dict(islice(tuple(attributes.items()), _MOST_ATTRIBUTES))


def _values_of(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a dataset has, and then what that has; each with where it is."""
    for depth, (_, attributes) in enumerate(wrapped(dataset)):
        inner = ((f"{name}.", _attributes_of(value)) for name, value in attributes.items() if name != "dataset")
        for owner, values in chain([("", attributes)], inner):
            for name, value in _first_of(values).items():
                yield f"{depth}.{owner}{name}", value
                if isinstance(value, (list, tuple)) and len(value) <= _MOST_TENSORS:
                    yield from ((f"{depth}.{owner}{name}[{at}]", each) for at, each in enumerate(value))


def _contents_of(value: Any) -> object:
    """What is compared of a value, of whatever dataset; None if it cannot be read."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return type(value).__name__, hash(value)
    if type(value) in (list, tuple):
        plain = [each for each in _spread(value) if type(each) in (bool, int, float, str, bytes)]
        return len(value), hash(tuple(plain))
    if type(value) in (dict, set):
        return len(value)
    if (type(value).__module__, type(value).__name__) == ("torch", "Tensor"):
        seen, shape = memory_of(value), tuple(value.shape)
    elif (type(value).__module__, type(value).__name__) == ("numpy", "ndarray"):
        is_plain = value.flags.c_contiguous and value.nbytes and not value.dtype.hasobject
        seen, shape = memoryview(value).cast("B") if is_plain and value.ndim else None, value.shape
    else:
        return None  # numpy.memmap, say
    if seen is None or not shape or len(seen) > _MOST_BYTES:
        return None
    every = len(seen) // _SEEN_BYTES | 1  # an odd number, so that it is not always the same byte of each element
    return shape, str(value.dtype), crc32(bytes(seen[::every]))


def _object_of(value: Any) -> object:
    """Which object it is; a list may have other ones by now."""
    return id(value), hash(tuple(map(id, _spread(value)))) if type(value) is list else 0


def _spread(values: Any) -> Any:
    return values[:: len(values) // _MOST_ITEMS + 1]
