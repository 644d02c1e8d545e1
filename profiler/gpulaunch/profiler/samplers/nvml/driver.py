"""Finds and opens NVML and decodes its results: the one place that imports its binding.

NVML is loaded only where there is a driver: its binding alone is several MB. Cards, drivers and bindings differ in what
they support, so every call is guarded separately; this module decides which errors are permanent.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_DRIVER_FILES: Final = ("dev/nvidiactl", "dev/dxg")  # Linux, and Windows' subsystem for it
_FINAL: Final = (
    *("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "INVALID_ARGUMENT", "NO_PERMISSION", "VGPU_ECC_NOT_SUPPORTED"),
    *("ARGUMENT_VERSION_MISMATCH", "DEPRECATED"),
)
"""NVML_ERROR_...: permanent for this card, driver or user. An older binding lacks some of them."""
_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Of the union of a field's value, in the order of nvmlValueType_t."""


def find_nvml() -> Any:
    """Import the binding; if there is none, the error that is raised is the reason."""
    return importlib.import_module("pynvml")


def missing(root: Path = Path("/")) -> str:
    """Return why there can be no NVML on this node; "" if there may be. Checks two paths only."""
    there = any((root / file).exists() for file in _DRIVER_FILES)
    return "" if there else "no NVIDIA driver on this node"


def open_nvml(load: Callable[[], Any]) -> tuple[Any, int, str]:
    """Return NVML, initialised (possibly more than once), and its number of GPUs; or (None, 0, reason)."""
    try:
        nvml = load()
        nvml.nvmlInit()
        return nvml, int(nvml.nvmlDeviceGetCount()), ""
    except Exception as error:  # a binding and a driver that do not match raise anything
        return None, 0, f"no NVML: {error}"


@contextmanager
def session() -> Generator[Any]:
    """Give NVML, initialised until the end of the block. What the binding or the driver raises is raised."""
    nvml = find_nvml()
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def is_code(nvml: Any, error: Exception, *names: str) -> bool:
    """Whether NVML failed with one of these codes (without `NVML_ERROR_`)."""
    code = getattr(error, "value", None)
    return code is not None and any(code == getattr(nvml, f"NVML_ERROR_{name}", None) for name in names)


def is_final(nvml: Any, error: Exception) -> bool:
    """Whether a retry is pointless. An AttributeError means that the binding is too old for the call."""
    return isinstance(error, AttributeError) or is_code(nvml, error, *_FINAL)


def number(value: Any) -> float | None:
    """Return the number in a c_nvmlFieldValue_t; None for a type that this binding does not know."""
    known = 0 <= value.valueType < len(_MEMBERS)
    return getattr(value.value, _MEMBERS[value.valueType], None) if known else None


def text(value: bytes | str) -> str:
    """Return a call's result as str; older bindings return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
