"""What tells whether a dataset is changed between epochs: workers that persist would not hear of it.

Contents are compared where they can be read without running code of the program: numbers, texts, tensors and arrays of
moderate size, of which at most some bytes are looked at. Of anything else it is compared which object it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final, NamedTuple
from zlib import crc32

MOST_WRAPPED: Final = 4
"""Datasets in each other, such as a Subset of one."""
MOST_ATTRIBUTES: Final = 64
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
    contents: list[object] = []
    objects: list[object] = []
    for owner, attributes in _attributes_of(dataset):
        for name, value in islice(tuple(attributes.items()), MOST_ATTRIBUTES):
            if len(contents) >= _MOST_VALUES:
                break
            contents.append((owner, name, _contents_of(value)))
            objects.append((owner, name, _object_of(value)))
            if isinstance(value, (list, tuple)) and len(value) <= MOST_WRAPPED:  # the tensors of a TensorDataset
                contents.extend(map(_contents_of, value))
    return State(id(dataset), tuple(contents), tuple(objects))


def wrapped(dataset: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield a dataset and those in it, each with its attributes."""
    for _ in range(MOST_WRAPPED):
        attributes = getattr(dataset, "__dict__", None)
        if not isinstance(attributes, dict):
            return
        yield dataset, attributes
        dataset = attributes.get("dataset")


def _attributes_of(dataset: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for depth, (_, attributes) in enumerate(wrapped(dataset)):
        yield str(depth), attributes
        for name, value in islice(tuple(attributes.items()), MOST_ATTRIBUTES):
            inner = getattr(value, "__dict__", None)
            if name != "dataset" and isinstance(inner, dict):
                yield f"{depth}.{name}", inner


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
        try:
            value = value.numpy()  # of the same memory
        except (RuntimeError, TypeError):  # on a GPU, sparse, of a type that NumPy has not
            return None
    elif (type(value).__module__, type(value).__name__) != ("numpy", "ndarray"):
        return None  # numpy.memmap, say
    if value.dtype.hasobject or not value.flags.c_contiguous or not 0 < value.nbytes <= _MOST_BYTES or not value.ndim:
        return None
    seen = memoryview(value).cast("B")
    every = len(seen) // _SEEN_BYTES | 1  # an odd number, so that it is not always the same byte of each element
    return value.shape, str(value.dtype), crc32(bytes(seen[::every]))


def _object_of(value: Any) -> object:
    """Which object it is; a list may have other ones by now."""
    return id(value), hash(tuple(map(id, _spread(value)))) if type(value) is list else 0


def _spread(values: Any) -> Any:
    return values[:: len(values) // _MOST_ITEMS + 1]
