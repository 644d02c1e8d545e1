"""The random number generators of this process: Python's, numpy's if it is loaded, torch's, and every accelerator's.

Reading them needs no synchronisation: torch keeps the state of a GPU's generator on the host.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

States = dict[str, Any]
"""Plain values and tensors: a rank's file can be loaded without running code in it."""


def capture() -> States:
    """Return all states as of now."""
    states: States = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy_random = sys.modules.get("numpy.random")  # numpy loads this submodule late
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        states["numpy"] = (name, keys.tolist(), *rest)
    devices = _accelerator()
    if devices is not None:
        states["accelerators"] = devices.get_rng_state_all()
    return states


def restore(states: States) -> None:
    """Restore the states of `capture`. Generators not loaded then, or missing now, are unchanged."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np  # the program had loaded it, so it is installed

        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    devices = _accelerator()
    if devices is not None and "accelerators" in states:
        for index, state in enumerate(states["accelerators"][: devices.device_count()]):
            devices.set_rng_state(state, index)


def reseed(*what: object) -> None:
    """Begin new streams that depend only on `what`: for ranks that the saved run did not have."""
    seed = int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little") >> 1
    random.seed(seed)
    torch.manual_seed(seed)  # every accelerator's too
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed & 0xFFFFFFFF)


def _accelerator() -> Any:
    """torch's module of the accelerator, such as torch.cuda, if this process uses one."""
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    module: Any = torch.get_device_module(kind) if kind is not None else None
    if not hasattr(module, "get_rng_state_all") or not getattr(module, "is_initialized", lambda: True)():
        return None
    return module
