"""The sidecar of a node with GPUs, over the stand-in for their driver's library that the tests of devices have.

Not a test: `python sidecar_with_gpus.py GPUS ARGUMENTS-OF-THE-SIDECAR`. What a card counts grows while it runs. The
node's memory is made up as well, so that no machine is fuller than another one; and no stacks are taken, as its ranks
have none. While there is a file `trouble` in the channel, card ILL is in trouble, the node's memory and its shared
memory are nearly full, and the collector of findings fails.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))

import pynvml
from libnvidia import GIB, Code, Gpu, Library, Narrow, binding

from gpulaunch.launcher.cli import sidecar
from gpulaunch.profiler.daemon.findings import Findings
from gpulaunch.profiler.record import HostState, Reading, StackState
from gpulaunch.profiler.samplers import driver
from gpulaunch.profiler.samplers.host import HostSampler
from gpulaunch.profiler.samplers.stacks import Stacks

MIB = 1 << 20
EVERY_S = 0.1
ILL = 3
XID = 79
"""The card has fallen off the bus, in NVIDIA's catalogue."""
# NVML's numbers of fields: energy, times of throttling (by power cap and sync boost), NVLink and PCIe traffic; and by
# how much they grow in a second. In trouble more comes over PCIe to each card, and ILL is throttled, and replays.
GROWS = {83: 650_000, 74: 10_000_000, 76: 10_000_000, 138: 10_000, 139: 10_000, 197: MIB, 198: 250 * MIB}
GROWS_IN_TROUBLE = {198: 1000 * MIB}
GROWS_ILL = {75: 500_000_000, 94: 20}
# What else is so in trouble: ECC errors, rows replaced and waiting; heat, a slow clock, half a link, a full memory.
FIELDS = {3: 5, 4: 2, 143: 1, 144: 1}
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": 20,
    "nvmlDeviceGetMemoryInfo": (137 * GIB, 139 * GIB),
    "nvmlDeviceGetClockInfo": 900,
    "nvmlDeviceGetTemperatureV": 96,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
}
HEALTHY_NODE: dict[str, Any] = {
    "shm_size_bytes": 8 * GIB,
    "shm_used_bytes": 1 * GIB,
    "memory_total_bytes": 64 * GIB,
    "memory_available_bytes": 48 * GIB,
    "cgroup_limit_bytes": 32 * GIB,
    "cgroup_used_bytes": 8 * GIB,
}
FULL_NODE: dict[str, Any] = {
    "shm_used_bytes": 7.8 * GIB,
    "memory_available_bytes": 1 * GIB,
    "cgroup_used_bytes": 31.5 * GIB,
}


def grow(gpus: list[Gpu], events: list[int], trouble: Path) -> None:
    """Let time pass for the cards."""
    before_s = time.monotonic()
    ill = gpus[ILL]
    fields, answers = dict(ill.fields), dict(ill.answers)
    was_ill = False
    while True:
        threading.Event().wait(EVERY_S)
        now_s = time.monotonic()
        passed_s, before_s = now_s - before_s, now_s
        is_ill = trouble.exists()
        for gpu in gpus:
            add(gpu, GROWS, passed_s)
            add(gpu, GROWS_IN_TROUBLE if is_ill else {}, passed_s)
        if is_ill:
            add(ill, GROWS_ILL, passed_s)
        if is_ill and not was_ill:
            ill.fields.update(FIELDS)
            ill.answers.update(ANSWERS)
            events.append(XID)
        if was_ill and not is_ill:
            ill.fields.update({number: fields[number] for number in FIELDS})
            ill.answers.update(answers)
        was_ill = is_ill


def add(gpu: Gpu, amounts: dict[int, int], passed_s: float) -> None:
    for number, amount in amounts.items():
        before = gpu.fields.get(number, 0)
        value = round(amount * passed_s)
        gpu.fields[number] = Narrow(before.value + value) if isinstance(before, Narrow) else before + value


def report(events: list[int]) -> None:
    """Give the library what it has no functions for: the events of card ILL, and uncorrected errors by card."""

    def nothing(*_: Any) -> None:
        pass

    def wait(_library: Library, _events: Any, data: Any, _timeout_ms: Any) -> None:
        if not events:
            raise Code(pynvml.NVML_ERROR_TIMEOUT)
        data._obj.device = ctypes.cast(ILL + 1, type(data._obj.device))  # as the library makes handles
        data._obj.eventData = events.pop()

    def uncorrected(library: Library, handle: Any, _kind: Any, _since: Any, errors: Any) -> None:
        errors._obj.value = library._gpu(handle).fields[4]

    for name, function in (
        *(("EventSetCreate", nothing), ("DeviceRegisterEvents", nothing), ("EventSetWait_v2", wait)),
        ("DeviceGetTotalEccErrors", uncorrected),
    ):
        setattr(Library, f"c_nvml{name}", function)


def stand_in(trouble: Path) -> None:
    """Put made-up figures in the place of the machine's."""
    host, findings = HostSampler.read, Findings.look

    def a_node(self: HostSampler, now: float) -> Reading[HostState]:
        reading = host(self, now)
        assert reading.values is not None
        full = FULL_NODE if trouble.exists() else {}
        return replace(reading, values=replace(reading.values, **(HEALTHY_NODE | full)))

    def nobody(_: Stacks, now: float) -> Reading[StackState]:
        return Reading(values=StackState(source="nobody", samples={}, cpu_s=0.0))

    def fails(self: Findings, *args: Any) -> Any:
        if trouble.exists():
            raise OSError("in trouble")
        return findings(self, *args)

    for of, name, instead in ((HostSampler, "read", a_node), (Stacks, "read", nobody), (Findings, "look", fails)):
        setattr(of, name, instead)


def main(count: int, arguments: list[str]) -> int:
    gpus = [Gpu(uuid=f"GPU-{index}", slot=f"00000000:{index:02X}:00.0") for index in range(count)]
    trouble = Path(arguments[arguments.index("--channel-dir") + 1], "trouble")
    events: list[int] = []
    report(events)
    stand_in(trouble)
    sys.modules["pynvml"] = binding(Library(*gpus))
    driver.missing = lambda *_: ""
    threading.Thread(target=grow, args=(gpus, events, trouble), daemon=True).start()
    return sidecar.run(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
