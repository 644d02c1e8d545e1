"""The sidecar of a node with GPUs, over the stand-in for their driver's library that the tests of devices have.

Not a test: `python sidecar_with_gpus.py GPUS ARGUMENTS-OF-THE-SIDECAR`. What a card counts grows while it runs. What
the kernel says of the node is made up as well, so that no machine is fuller than another one: its memory, its cores,
who waits for them, the dataloaders' workers; and the stacks, as its ranks have none. While there is a file `trouble` in
the channel, card ILL is in trouble and no card has much to do, the node's memory and its shared memory are nearly full,
everybody waits, the workers are gone, and the sidecar itself is slow, large and busy, and its collector of findings
fails.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))

import pynvml
from libnvidia import GIB, Code, Gpu, Library, Narrow, binding

from gpulaunch.launcher.cli import sidecar
from gpulaunch.profiler.daemon import sidecar as loop
from gpulaunch.profiler.daemon.findings import Findings
from gpulaunch.profiler.record import HostState, RankProcesses, Reading, Role, StackState
from gpulaunch.profiler.samplers.host import PRESSURES, HostSampler
from gpulaunch.profiler.samplers.nvml import driver
from gpulaunch.profiler.samplers.process import ProcessSampler
from gpulaunch.profiler.samplers.stacks import Stacks

MIB = 1 << 20
EVERY_S = 0.1
ILL = 3
XID = 79
"""The card has fallen off the bus, in NVIDIA's catalogue."""
# NVML's numbers of fields: energy, times of throttling (by power cap and sync boost), NVLink and PCIe traffic; and by
# how much they grow in a second. In trouble more comes over PCIe to each card, and ILL is throttled, and replays, and
# has more traffic than any program says.
GROWS = {83: 650_000, 74: 10_000_000, 76: 10_000_000, 138: 10_000, 139: 10_000, 197: MIB, 198: 200 * MIB}
GROWS_IN_TROUBLE = {198: 1000 * MIB}
GROWS_ILL = {75: 500_000_000, 94: 20, 138: 90_000, 198: 20_000 * MIB}
# What else is so in trouble: ECC errors, rows replaced and waiting; heat, a slow clock, half a link, a full memory.
FIELDS = {3: 5, 4: 2, 143: 1, 144: 1, 186: Narrow(120_000)}
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": 20,
    "nvmlDeviceGetMemoryInfo": (137 * GIB, 139 * GIB),
    "nvmlDeviceGetClockInfo": 900,
    "nvmlDeviceGetTemperatureV": 96,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
}
# GPM's numbers: multiprocessors with work, occupancy, tensor cores, memory bandwidth, in per cent; of every card.
IDLE = {2: 20.0, 3: 8.0, 5: 6.0, 10: 4.0}
HEALTHY_NODE: dict[str, Any] = {
    "shm_size_bytes": 8 * GIB,
    "shm_used_bytes": 1 * GIB,
    "memory_total_bytes": 64 * GIB,
    "memory_available_bytes": 48 * GIB,
    "swap_used_bytes": 0,
    "cgroup_limit_bytes": 32 * GIB,
    "cgroup_used_bytes": 8 * GIB,
    "cores": 96,
    "cpu_quota_cores": 96.0,
}
FULL_NODE: dict[str, Any] = {
    "shm_used_bytes": 7.8 * GIB,
    "memory_available_bytes": 1 * GIB,
    "swap_used_bytes": 4 * GIB,
    "cgroup_used_bytes": 31.5 * GIB,
}
# Of a second: what tasks of the node lacked something, and what the threads of a rank waited for a core. In trouble
# stacks are taken in syncs instead of the forward pass.
LACKED, WAITED_S, STACKS = 0.01, 0.01, {"forward": 20}
LACKED_IN_TROUBLE, WAITED_IN_TROUBLE_S, STACKS_IN_TROUBLE = 0.9, 2.0, {"sync": 40}
LATE_S = 2.5
"""How long reading the node takes in trouble: longer than two intervals."""
HOARD_BYTES = 96 * MIB
CORES = 0.8
"""What the sidecar computes in trouble, besides what it does: it yields to all others, and might not get them."""


class Counters:
    """Made-up counters, which grow with time."""

    def __init__(self) -> None:
        self.counts: dict[Any, float] = {}
        self.told_s = time.monotonic()

    def grow(self, by_second: Mapping[Any, float]) -> dict[Any, float]:
        """Let the time pass since the last time, and give them."""
        now_s = time.monotonic()
        for name, amount in by_second.items():
            self.counts[name] = self.counts.get(name, 0.0) + amount * (now_s - self.told_s)
        self.told_s = now_s
        return dict(self.counts)


def grow(gpus: list[Gpu], events: list[int], trouble: Path) -> None:
    """Let time pass for the cards; and be large in trouble."""
    before_s = time.monotonic()
    ill = gpus[ILL]
    fields, answers = dict(ill.fields), dict(ill.answers)
    well = [dict(gpu.gpm or {}) for gpu in gpus]
    was_ill = False
    hoard = b""
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
            hoard = hoard or b"\1" * HOARD_BYTES
        if is_ill and not was_ill:
            ill.fields.update(FIELDS)
            ill.answers.update(ANSWERS)
            for gpu in gpus:
                gpu.gpm = (gpu.gpm or {}) | IDLE
            events.append(XID)
        if was_ill and not is_ill:
            ill.fields.update({number: fields[number] for number in FIELDS})
            ill.answers.update(answers)
            for gpu, gpm in zip(gpus, well, strict=True):
                gpu.gpm = gpm
            hoard = b""
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
        errors._obj.value = library.gpu_of(handle).fields[4]

    for name, function in (
        *(("EventSetCreate", nothing), ("DeviceRegisterEvents", nothing), ("EventSetWait_v2", wait)),
        ("DeviceGetTotalEccErrors", uncorrected),
    ):
        setattr(Library, f"c_nvml{name}", function)


def stand_in(trouble: Path) -> None:
    """Put made-up figures in the place of the machine's."""
    host, processes, findings, spent_ns = HostSampler.read, ProcessSampler.read, Findings.look, loop.process_cpu_ns
    lacked, waited, stacks, computed = Counters(), Counters(), Counters(), Counters()

    def a_node(self: HostSampler, now: float) -> Reading[HostState]:
        reading = host(self, now)
        ill = trouble.exists()
        pressure_s = lacked.grow(dict.fromkeys(PRESSURES, LACKED_IN_TROUBLE if ill else LACKED))
        if ill:
            time.sleep(LATE_S)
        made_up = HEALTHY_NODE | (FULL_NODE if ill else {})
        return replace(reading, values=replace(reading.values, **made_up, pressure_s=pressure_s))

    def its_processes(self: ProcessSampler, now: float) -> Reading[tuple[RankProcesses, ...]]:
        reading = processes(self, now)
        ill = trouble.exists()
        waited_s = waited.grow({Role.TRAINER: WAITED_IN_TROUBLE_S if ill else WAITED_S})
        made_up: dict[str, Any] = {"runqueue_s": waited_s, "threads": 6.0 if ill else 1.0}
        made_up["workers_alive"] = 0 if ill else 1
        return replace(reading, values=tuple(replace(each, **made_up) for each in reading.values))

    def its_stacks(_: Stacks, now: float) -> Reading[StackState]:
        taken = stacks.grow(STACKS_IN_TROUBLE if trouble.exists() else STACKS)
        samples = {phase: int(count) for phase, count in taken.items()}
        return Reading(values=StackState(source="nobody", samples=samples, cpu_s=0.0))

    def fails(self: Findings, *args: Any) -> Any:
        if trouble.exists():
            raise OSError("in trouble")
        return findings(self, *args)

    def computes_ns() -> int:
        return spent_ns() + round(1e9 * sum(computed.grow({"": CORES if trouble.exists() else 0.0}).values()))

    for of, name, instead in (
        *((HostSampler, "read", a_node), (ProcessSampler, "read", its_processes)),
        *((Stacks, "read", its_stacks), (Findings, "look", fails), (loop, "process_cpu_ns", computes_ns)),
    ):
        setattr(of, name, instead)


def ask_often() -> None:
    """Refresh at every interval, whatever it costs, and ask for all proportional memory: pictures do not wait long."""
    loop.SHARE_OF_A_CORE = 1.0
    often = {"pss_period_s": 5.0, "pss_budget_s": 1.0, "pss_share": 1.0}
    ProcessSampler.__init__.__kwdefaults__ |= often


def main(count: int, arguments: list[str]) -> int:
    gpus = [Gpu(uuid=f"GPU-{index}", slot=f"00000000:{index:02X}:00.0") for index in range(count)]
    trouble = Path(arguments[arguments.index("--channel-dir") + 1], "trouble")
    events: list[int] = []
    report(events)
    stand_in(trouble)
    ask_often()
    sys.modules["pynvml"] = binding(Library(*gpus))
    driver.missing = lambda *_: ""
    threading.Thread(target=grow, args=(gpus, events, trouble), daemon=True).start()
    return sidecar.run(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
