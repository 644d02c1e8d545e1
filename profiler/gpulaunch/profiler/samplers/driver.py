"""How NVML is found and opened, and how its answers are taken apart: for all samplers that ask it.

NVML is loaded only where there is a driver: its binding alone is several MB. What a card, a driver and a binding can
say differs, so every call is guarded by itself, and here it is decided which errors are for ever.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_DRIVER_FILES: Final = ("dev/nvidiactl", "dev/dxg")  # Linux, and Windows' subsystem for it
_FINAL: Final = (
    *("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "INVALID_ARGUMENT", "NO_PERMISSION", "VGPU_ECC_NOT_SUPPORTED"),
    *("ARGUMENT_VERSION_MISMATCH", "DEPRECATED"),
)
"""NVML_ERROR_...: what this card, driver or user cannot have, now or later. An older binding lacks some of them."""
_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Of the union of a field's value, in the order of nvmlValueType_t."""


def find_nvml() -> Any:
    """Import the binding; the error, if there is none, is the reason."""
    return importlib.import_module("pynvml")


def missing(root: Path = Path("/")) -> str:
    """Say why there can be no NVML on this node; "" if there may be. Costs two looks at the file system."""
    there = any((root / file).exists() for file in _DRIVER_FILES)
    return "" if there else "no NVIDIA driver on this node"


def open_nvml(load: Callable[[], Any]) -> tuple[Any, int, str]:
    """Give NVML, initialised (it may be more than once), and how many GPUs it knows; or (None, 0, why)."""
    try:
        nvml = load()
        nvml.nvmlInit()
        return nvml, int(nvml.nvmlDeviceGetCount()), ""
    except Exception as error:  # a binding and a driver that do not fit each other raise anything
        return None, 0, f"no NVML: {error}"


def is_code(nvml: Any, error: Exception, *names: str) -> bool:
    """Tell whether NVML failed with one of these codes (`NVML_ERROR_` left out)."""
    code = getattr(error, "value", None)
    return code is not None and any(code == getattr(nvml, f"NVML_ERROR_{name}", None) for name in names)


def is_final(nvml: Any, error: Exception) -> bool:
    """Tell whether it makes no sense to ask again. An AttributeError: the binding is older than the question."""
    return isinstance(error, AttributeError) or is_code(nvml, error, *_FINAL)


def number(value: Any) -> float | None:
    """Give the number in a c_nvmlFieldValue_t; None for a type that this binding does not know yet."""
    known = 0 <= value.valueType < len(_MEMBERS)
    return getattr(value.value, _MEMBERS[value.valueType], None) if known else None


def text(value: bytes | str) -> str:
    """Give what a call returned as text; older bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
