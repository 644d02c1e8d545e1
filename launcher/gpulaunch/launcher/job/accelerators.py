"""Accelerators that NVML does not know (AMD, Intel, others, and NVIDIA's in WSL): counted by torch, as in torchrun."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping

_DEVICES = (
    *("kfd", "dri/renderD*", "accel/accel*", "accel[0-9]*", "hl[0-9]*", "davinci[0-9]*", "neuron[0-9]*", "dxg"),
    *("cambricon_dev*", "mtgpu*", "mxcd*", "iluvatar*", "biren*", "rbln*"),
)
"""Device files: AMD; Intel, AMD; Gaudi and TPU; Ascend; Trainium; a GPU in WSL; Cambricon, Moore Threads, MetaX,
Iluvatar, Biren, Rebellions."""
_TIMEOUT_S = 120.0
_CANNOT = "torch cannot count the accelerators here ({why}); give a number"
_COUNT = """
import torch
device = {"gpu": torch.cuda, "xpu": torch.xpu}.get(%r, torch.accelerator)
print(device.device_count() if device.is_available() else 0)
"""


def count(kind: str, environ: Mapping[str, str], root: str = "/") -> int:
    """How many accelerators of a kind (gpu, xpu, or auto for any) torchrun would start a rank for; 0: torch sees none.

    If a device file exists, torch is imported in a separate process, which takes seconds.

    Raises:
        ValueError: torch is installed, but the query failed.
    """
    if not any(glob.glob(os.path.join(root, "dev", name)) for name in _DEVICES):
        return 0
    import subprocess  # not needed for every job

    try:
        counted = subprocess.run(
            [sys.executable, "-P", "-c", _COUNT % kind],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ValueError(_CANNOT.format(why=err)) from err
    if "No module named 'torch'" in counted.stderr:
        return 0
    try:
        return int(counted.stdout.split()[-1])
    except (ValueError, IndexError):
        why = (counted.stderr.strip().splitlines() or [f"exit code {counted.returncode}"])[-1]
        raise ValueError(_CANNOT.format(why=why)) from None
