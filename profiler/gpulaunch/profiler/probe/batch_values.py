"""Reads the whole numbers of a tensor on the CPU without an operation of torch's.

A mode of the program would see one. And `tensor.numpy()` shares the memory with NumPy, after which torch does not let
the program change its size any more. So they are copied.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from ctypes import string_at
from typing import Any, Final

_TYPES: Final = {
    **{f"torch.{name}": name for name in ("int64", "int32", "int16", "int8", "uint8")},
    "torch.bool": "uint8",
}


def without_functions() -> AbstractContextManager[Any]:
    """Return a context in which no mode or tensor type of the program sees what is asked of tensors."""
    torch: Any = sys.modules.get("torch")
    return nullcontext() if torch is None else torch._C.DisableTorchFunction()


def whole_numbers(tensor: Any, most: int) -> Any:
    """Return the values as an array of NumPy's, of the same shape; None: they are of another kind, elsewhere, or too
    many, or NumPy is not loaded.

    Args:
        tensor: of torch's own type; torch functions must be disabled.
        most: elements.
    """
    numpy: Any = sys.modules.get("numpy")
    kind = _TYPES.get(str(tensor.dtype))
    if numpy is None or kind is None or tensor.device.type != "cpu" or str(tensor.layout) != "torch.strided":
        return None
    if tensor.is_nested or not 0 < tensor.numel() <= most or not tensor.is_contiguous():
        return None
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    begin = tensor.storage_offset() * tensor.element_size()
    if storage.nbytes() < begin + size or not storage.data_ptr():
        return None  # given back
    return numpy.frombuffer(string_at(storage.data_ptr() + begin, size), kind).reshape(tuple(tensor.shape))
