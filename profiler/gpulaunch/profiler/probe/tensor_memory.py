"""Reads what a tensor on the CPU holds without an operation of torch's.

A mode of the program would see one. And `tensor.numpy()` shares the memory with NumPy, after which torch does not let
the program change its size any more.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_char
from typing import Any, Final

_SOME: Final = 8
_TYPES: Final = {
    **{f"torch.{name}": name for name in ("int64", "int32", "int16", "int8", "uint8")},
    "torch.bool": "uint8",
}


def without_functions() -> AbstractContextManager[Any]:
    """Return a context in which no mode or tensor type of the program sees what is asked of tensors."""
    torch: Any = sys.modules.get("torch")
    return nullcontext() if torch is None else torch._C.DisableTorchFunction()


def storage_of(tensor: Any) -> tuple[Any, int] | None:
    """Return the storage of a tensor, which it may be a part of, and where its memory is; None: it has none.

    Args:
        tensor: of torch's own type.
    """
    if str(tensor.layout) != "torch.strided" or tensor.is_nested:
        return None
    try:
        storage = tensor.untyped_storage()
        return storage, int(storage.data_ptr())
    except RuntimeError:
        return None  # a wrapper of torch's, without memory of its own


def memory_of(tensor: Any) -> memoryview | None:
    """Return the bytes of a tensor, valid as long as it is; None: they are elsewhere, or not one after the other.

    Args:
        tensor: of torch's own type.
    """
    if tensor.device.type != "cpu" or (found := storage_of(tensor)) is None:
        return None
    storage, first = found
    size, begin = (int(count * tensor.element_size()) for count in (tensor.numel(), tensor.storage_offset()))
    if not size or not tensor.is_contiguous() or storage.nbytes() < begin + size or not first:
        return None  # the last two: given back
    return memoryview((c_char * size).from_address(first + begin)).cast("B")


def some_values(tensor: Any) -> bytes:
    """Return the bytes of some values, spread over a tensor: all of a few, else 8 to 15; empty: see `memory_of`.

    Args:
        tensor: of torch's own type.
    """
    memory = memory_of(tensor)
    if memory is None:
        return b""  # given back, as by what keeps parameters elsewhere meanwhile
    size = int(tensor.element_size())
    starts = range(0, len(memory), size * max(1, int(tensor.numel()) // _SOME))
    return b"".join(memory[start : start + size] for start in starts)


def whole_numbers(tensor: Any, most: int) -> Any:
    """Return the values as an array of NumPy's, of the same shape, valid as long as the tensor is; None: they are of
    another kind, elsewhere, or too many, or NumPy is not loaded.

    Args:
        tensor: of torch's own type; torch functions must be disabled.
        most: elements.
    """
    numpy: Any = sys.modules.get("numpy")
    kind = _TYPES.get(str(tensor.dtype))
    if numpy is None or kind is None or tensor.numel() > most or (memory := memory_of(tensor)) is None:
        return None
    return numpy.frombuffer(memory, kind).reshape(tuple(tensor.shape))
