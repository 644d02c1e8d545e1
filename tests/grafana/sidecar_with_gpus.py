"""The sidecar of a node with GPUs, over the stand-in for their driver's library that the tests of devices have.

Not a test: `python sidecar_with_gpus.py GPUS ARGUMENTS-OF-THE-SIDECAR`. What a card counts grows while it runs.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))

from libnvidia import Gpu, Library, Narrow, binding

from gpulaunch.launcher.cli import sidecar
from gpulaunch.profiler.samplers import driver

MIB = 1 << 20
EVERY_S = 0.1
# NVML's numbers of fields: energy, times of throttling, NVLink and PCIe traffic, replays; and how they grow.
GROWS = {83: 65_000, 74: 1_000_000, 76: 1_000_000, 138: 1000, 139: 1000, 197: 60 * MIB, 198: 20 * MIB, 94: 1}


def grow(gpus: list[Gpu]) -> None:
    """Let time pass for the cards."""
    while True:
        threading.Event().wait(EVERY_S)
        for gpu in gpus:
            for number, amount in GROWS.items():
                before = gpu.fields.get(number, 0)
                gpu.fields[number] = Narrow(before.value + amount) if isinstance(before, Narrow) else before + amount


def main(count: int, arguments: list[str]) -> int:
    gpus = [Gpu(uuid=f"GPU-{index}", slot=f"00000000:{index:02X}:00.0") for index in range(count)]
    sys.modules["pynvml"] = binding(Library(*gpus))
    driver.missing = lambda *_: ""
    threading.Thread(target=grow, args=(gpus,), daemon=True).start()
    return sidecar.run(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
