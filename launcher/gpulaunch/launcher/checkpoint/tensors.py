"""Verifies safetensors files, and the index of a model that was saved in several.

The format has no checksum: the header must describe exactly the bytes that follow it, to the last one, so a truncated
or half written file is detected, and a flipped bit inside a tensor is not.
"""

from __future__ import annotations

import math
from typing import Any

from gpulaunch.launcher.checkpoint import torchfile
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.files import Files, json_object
from gpulaunch.launcher.checkpoint.source import Entry, join

_HEADER_CAP_BYTES = 100_000_000  # as in the reference implementation
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    "F4": 4,
}
INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json")


def check(files: Files, entry: Entry) -> None:
    """Verify one safetensors file. Raises Damaged."""
    label = files.label(entry.path)
    with files.opened(entry) as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(_HEADER_CAP_BYTES, entry.size_bytes - 8):
            raise Damaged(f"{label}: its header needs {8 + length} bytes, and it has {entry.size_bytes}")
        header = json_object(file.read(length), f"the header of {label}")
    spans = sorted(_span(name, tensor, label) for name, tensor in header.items() if name != "__metadata__")
    end = 0
    for first, last in spans:
        if first != end:
            raise Damaged(f"{label}: its tensors do not lie one after another at byte {8 + length + end}")
        end = last
    if 8 + length + end != entry.size_bytes:
        raise Damaged(f"{label} has {entry.size_bytes} of {8 + length + end} bytes")


def _span(name: str, tensor: Any, label: str) -> tuple[int, int]:
    """The extent of a tensor, which must match its type and shape."""
    try:
        first, last = tensor["data_offsets"]
        elements, bits = math.prod(tensor["shape"]), _BITS.get(tensor["dtype"])
        fits = 0 <= first <= last and (not bits or (last - first) * 8 == elements * bits)
    except (KeyError, TypeError, ValueError):
        fits = first = last = 0
    if not fits or type(first) is not int or type(last) is not int:
        raise Damaged(f"{label}: its header is invalid for tensor {name[:80]}")
    return first, last


def check_index(files: Files, index: str) -> None:
    """Verify every file that `model.safetensors.index.json` or `pytorch_model.bin.index.json` names. Raises Damaged."""
    shards = files.json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise Damaged(f"{files.label(index)} names no files")
    directory = index.rpartition("/")[0]
    for name in sorted(set(shards.values())):
        check_weights(files, files.entry(files.inside(directory, name, said_by=files.label(index))))


def check_weights(files: Files, entry: Entry) -> None:
    """Verify a file of weights by its name: safetensors or torch.save. Raises Damaged."""
    if entry.name.endswith(".safetensors"):
        check(files, entry)
    else:
        torchfile.check(files, entry)


def check_directory(files: Files, directory: str) -> None:
    """Verify a model that was saved as an index and its shards. Raises Damaged."""
    for name in files.listing(directory):
        if name.endswith(INDEX_SUFFIXES):
            check_index(files, join(directory, name))
