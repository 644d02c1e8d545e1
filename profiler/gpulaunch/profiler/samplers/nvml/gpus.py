"""Samples all GPUs of the node in a helper thread, with totals across sidecar restarts and the age of each reading.

Two halves. `_Node` calls NVML; it runs in the helper's thread, where it may hang. `GpuSampler` runs in the sidecar's
loop: it takes the last reading of `_Node` and adds what needs the ledger, which belongs to the loop.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpulaunch.profiler.record import DIRECTIONS, THROTTLE_REASONS, GpuState, Reading
from gpulaunch.profiler.samplers import numa
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.nvml import driver
from gpulaunch.profiler.samplers.nvml.card import TOTALS, Card, CardReading
from gpulaunch.profiler.samplers.nvml.timeout_guard import Helper, TimeoutGuard

_RARELY_S: Final = 10.0  # between reads of slow-changing values, and checks for new or removed MIG instances
_STALE_S: Final = 10.0  # older values are not current


class GpuSampler:
    """Reads every GPU and MIG instance of the node; without a driver it starts no thread and loads nothing."""

    def __init__(
        self,
        ledger: MonotonicTotals,
        helper: Helper,
        *,
        nvml: Callable[[], Any] = driver.find_nvml,
        root: Path = Path("/"),
        patience_s: float = 0.5,
    ) -> None:
        self._ledger = ledger
        self._absent = driver.missing(root)
        self._source = f"{os.getpid()}:{time.monotonic_ns()}"
        node = _Node(nvml, helper.clock, root)
        nothing: tuple[CardReading, ...] = ()
        self.guard = TimeoutGuard(node, helper, what="NVML", nothing=nothing, patience_s=patience_s)
        """Makes all calls of NVML."""

    def read(self, now: float) -> Reading[tuple[GpuState, ...]]:
        """Return the last reading of every GPU: the current one, if NVML answers in time."""
        if self._absent:
            return Reading(values=(), absent=self._absent)
        reading = self.guard.read(now)
        values = tuple(self._state(seen, now) for seen in reading.values)
        return Reading(values=values, absent=reading.absent, errors=reading.errors, late_s=reading.late_s)

    def _state(self, seen: CardReading, now: float) -> GpuState:
        age_s = max(0.0, now - seen.at_s)
        state = seen.state if age_s < _STALE_S else lasting(seen.state)
        counters = [seen.totals.get(name, 0) for name in TOTALS]
        sums = self._ledger.total(f"gpu/{state.uuid}", {self._source: counters}, width=len(TOTALS))
        totals = {name: total for name, total in zip(TOTALS, sums, strict=True) if name in seen.totals}
        return replace(
            state,
            age_s=age_s,
            energy_joules=totals["energy_mj"] / 1000 if "energy_mj" in totals else None,
            throttle_seconds={reason: totals[reason] / 1e9 for reason in THROTTLE_REASONS if reason in totals},
            pcie_bytes=_by_direction("pcie", totals),
            pcie_replays=totals.get("pcie_replays"),
            nvlink_bytes=_by_direction("nvlink", totals),
        )


def _by_direction(link: str, totals: dict[str, int]) -> dict[str, int]:
    return {way: totals[f"{link}_{way}"] for way in DIRECTIONS if f"{link}_{way}" in totals}


def lasting(state: GpuState) -> GpuState:
    """Return the part of a GPU's state that holds regardless of its age."""
    return GpuState(
        index=state.index,
        uuid=state.uuid,
        parent_uuid=state.parent_uuid,
        instance=state.instance,
        model=state.model,
        memory_total_bytes=state.memory_total_bytes,
        pcie_generation_max=state.pcie_generation_max,
        pcie_width_max=state.pcie_width_max,
        ecc_errors=state.ecc_errors,
        remapped_rows=state.remapped_rows,
        remap_pending=state.remap_pending,
        remap_failed=state.remap_failed,
        numa_node=state.numa_node,
    )


class _Node:
    """The GPUs in NVML's order, each followed by its MIG instances. Every call may hang."""

    def __init__(self, load: Callable[[], Any], clock: Callable[[], float], root: Path) -> None:
        self._load = load
        self._clock = clock
        self._root = root
        self._nvml: Any = None
        self._num_gpus = 0
        self._absent: str | None = None
        self._rarely_s = 0.0
        self._cards: dict[int, Card] = {}
        self._instances: dict[int, dict[str, Card]] = {}
        self._places: dict[str, tuple[int, int]] = {}  # of instances, by UUID
        self._numa_nodes: dict[int, int | None] = {}
        self._errors: list[str] = []

    def read(self, now: float) -> Reading[tuple[CardReading, ...]]:
        if self._absent is None:
            self._nvml, self._num_gpus, self._absent = driver.open_nvml(self._load)
            if not self._absent and not self._num_gpus:
                self._absent = "NVML shows no GPU"
            self._rarely_s = now
        if self._absent:
            return Reading(values=(), absent=self._absent)
        self._errors = []
        rarely = now >= self._rarely_s
        if rarely:
            self._rarely_s = now + _RARELY_S
            self._look()
        values: list[CardReading] = []
        for index, card in sorted(self._cards.items()):
            for each in (card, *self._instances.get(index, {}).values()):
                seen, errors = each.read(rarely=rarely)
                place, numa_node = self._places.get(each.uuid), self._numa_nodes.get(index)
                values.append(replace(seen, state=replace(seen.state, instance=place, numa_node=numa_node)))
                self._errors += errors
        return Reading(values=tuple(values), errors=tuple(self._errors), late_s=self._clock() - now)

    def _look(self) -> None:
        """Find cards that were not accessible before, and the current instances."""
        for index in range(self._num_gpus):
            try:
                if index not in self._cards:
                    handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                    self._cards[index] = Card(self._nvml, handle, index=index, clock=self._clock)
                self._look_for_instances(self._cards[index], index)
                if index not in self._numa_nodes:
                    self._numa_nodes[index] = self._numa_node(self._cards[index])
            except Exception as error:  # a faulty card must not hide the others
                self._errors.append(f"GPU {index}: {error}")

    def _numa_node(self, card: Card) -> int | None:
        """Return the NUMA node of a card's slot; None where the card or the machine does not report it."""
        try:
            slot = driver.text(self._nvml.nvmlDeviceGetPciInfo(card.handle).busId)
        except Exception as error:
            if driver.is_final(self._nvml, error):
                return None
            raise
        return numa.gpu_node(slot, root=self._root)

    def _look_for_instances(self, card: Card, index: int) -> None:
        known = self._instances.get(index, {})
        there: dict[str, Card] = {}
        for handle in self._mig_handles(card):
            uuid = driver.text(self._nvml.nvmlDeviceGetUUID(handle))
            if uuid not in self._places:
                with contextlib.suppress(self._nvml.NVMLError):  # then it is identified by its UUID
                    gpu_instance = int(self._nvml.nvmlDeviceGetGpuInstanceId(handle))
                    self._places[uuid] = gpu_instance, int(self._nvml.nvmlDeviceGetComputeInstanceId(handle))
            # A recreated instance has another UUID, even in the place of one that is gone.
            there[uuid] = known.get(uuid) or Card(self._nvml, handle, index=index, clock=self._clock, parent=card)
        self._instances[index] = there
        for uuid in known.keys() - there.keys():
            known[uuid].close()
            self._places.pop(uuid, None)

    def _mig_handles(self, card: Card) -> Iterator[Any]:
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetMigMode(card.handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
                return
            num_places = int(nvml.nvmlDeviceGetMaxMigDeviceCount(card.handle))
        except Exception as error:
            if driver.is_final(nvml, error):
                return  # a card without MIG
            raise
        for place in range(num_places):
            try:
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, place)
            except Exception as error:
                if not driver.is_code(nvml, error, "NOT_FOUND"):
                    raise
