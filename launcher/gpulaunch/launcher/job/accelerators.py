"""Accelerators that NVML does not know (AMD, Intel, others, and NVIDIA's in WSL): counted by torch, as in torchrun."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping

_DEVICES = ("kfd", "dri/renderD*", "accel/accel*", "accel[0-9]*", "davinci[0-9]*", "neuron[0-9]*", "dxg")
"""AMD; Intel, AMD; Gaudi and TPU, twice; Ascend; Trainium; a GPU in WSL."""
_TIMEOUT_S = 120.0
_COUNT = """
import torch
device = {"gpu": torch.cuda, "xpu": torch.xpu}.get(%r, torch.accelerator)
print(device.device_count() if device.is_available() else 0)
"""


def count(kind: str, environ: Mapping[str, str], root: str = "/") -> int:
    """How many accelerators of a kind (gpu, xpu, or auto for any) torchrun would start a rank for; 0: torch sees none.

    Where there is a device file of one, torch is imported in a process of its own, which takes seconds.
    """
    if not any(glob.glob(os.path.join(root, "dev", name)) for name in _DEVICES):
        return 0
    import subprocess  # not for every job

    try:
        counted = subprocess.run(
            [sys.executable, "-P", "-c", _COUNT % kind],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
        )
        return int(counted.stdout.split()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return 0
