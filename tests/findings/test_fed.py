"""From what GPUs, kernel and ranks say to the finding: no rule waits for something that nobody brings.

The rules that need a GPU, or a machine of two NUMA nodes, over recorded sources (see recorded.py) and a whole sidecar;
the others are found in real runs, see test_planted.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pynvml
import pytest
from libnvidia import GIB, NOT_SUPPORTED, Gpu

from gpulaunch.profiler.channel.quantities import GpuMemory
from gpulaunch.profiler.record import Finding

if TYPE_CHECKING:
    from recorded import Recorded

MS = 1_000_000
MIB = 1 << 20
LINE = "train.py:88 step"


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a second brings: `brings(node, second, well)`."""

    brings: Callable[[Recorded, int, bool], None]
    seconds: int = 16
    """Ten steps of warm-up, two windows."""
    line: int | None = None
    subject: str = ""
    lost_ms: float = 0.0


def utilization(node: Recorded, percent: int) -> None:
    node.gpus[0].answers["nvmlDeviceGetUtilizationRates"] = percent


def pageable_batches(node: Recorded, second: int, well: bool) -> None:
    """30 ms of every step of 130 ms; the GPU idles for a fifth of it, which is all that can be won."""
    utilization(node, 80)
    (rank,) = node.ranks
    rank.ms["h2d"] = 1.0 if well else 31.0
    blocked_ns = round(rank.ms["h2d"] * MS)
    pinned = int(well)
    rank.line("h2d", LINE, size_bytes=8 * MIB, blocked_ns=blocked_ns, pinned=pinned, non_blocking=pinned)


def pinned_batches_that_block(node: Recorded, second: int, well: bool) -> None:
    utilization(node, 80)
    (rank,) = node.ranks
    rank.ms["h2d"] = 1.0 if well else 31.0
    rank.line("h2d", LINE, blocked_ns=round(rank.ms["h2d"] * MS), pinned=1, non_blocking=int(well))


def a_value_of_every_step(node: Recorded, second: int, well: bool) -> None:
    """The twin waits as long, and its GPU works meanwhile."""
    utilization(node, 97 if well else 80)
    node.ranks[0].ms["sync"] = 31.0
    node.ranks[0].line("item", LINE, size_bytes=4, blocked_ns=31 * MS)


def a_mask_that_is_moved(node: Recorded, second: int, well: bool) -> None:
    kind, text = ("h2d", LINE) if well else ("built_on_cpu", "built at train.py:88, moved at train.py:90")
    node.ranks[0].line(kind, text, size_bytes=MIB, blocked_ns=3 * MS)


def one_process_for_two_gpus(node: Recorded, second: int, well: bool) -> None:
    node.ranks[0].facts["dataparallel"] = None if well else "train.py:88 main"


def thirty_two_bits(node: Recorded, second: int, well: bool) -> None:
    tensor, fp32 = (61.0, 7.0) if well else (0.0, 60.0)
    gpm = node.gpus[0].gpm
    assert gpm is not None
    gpm |= {5: tensor, 12: fp32}


def tensors_that_stay(node: Recorded, second: int, well: bool) -> None:
    words = node.ranks[0].writer.words
    words[GpuMemory.allocated_bytes] = (8000 + (0 if well else 30 * second)) * MIB
    words[GpuMemory.reserved_bytes] = 20000 * MIB


def blocks_in_pieces(node: Recorded, second: int, well: bool) -> None:
    words = node.ranks[0].writer.words
    words[GpuMemory.allocated_bytes], words[GpuMemory.reserved_bytes] = 8000 * MIB, 20000 * MIB
    words[GpuMemory.inactive_split_bytes] = (500 if well else 9000) * MIB
    words[GpuMemory.alloc_retries] += 1


def a_hot_card(node: Recorded, second: int, well: bool) -> None:
    """Half of the time, at half of the clock; the twin is held back by its power cap, as every card at work."""
    node.gpus[0].answers["nvmlDeviceGetClockInfo"] = 1980 if well else 990
    node.gpus[0].fields[74 if well else 75] = 500 * MS * second


def cores_of_another_node(node: Recorded, second: int, well: bool) -> None:
    node.ranks[0].may_run_on("0-3" if well else "4-7")


def a_list_that_grows(node: Recorded, second: int, well: bool) -> None:
    """The twin maps a dataset, and what it has read of that stays in the page cache."""
    grown_mib = 30 * second
    node.ranks[0].resident(anonymous_mib=2000 + (0 if well else grown_mib), files_mib=500 + (grown_mib if well else 0))


def workers_that_grow(node: Recorded, second: int, well: bool) -> None:
    """The same of a worker, by its proportional size."""
    grown_mib = 30 * second
    node.ranks[0].worker(anonymous_mib=200 + (0 if well else grown_mib), files_mib=50 + (grown_mib if well else 0))


SOURCES = {
    "unpinned-copies": Source(brings=pageable_batches, line=88, lost_ms=26.0),
    "blocking-copies": Source(brings=pinned_batches_that_block, line=88, lost_ms=26.0),
    "sync-every-step": Source(brings=a_value_of_every_step, line=88, lost_ms=26.0),
    "tensor-built-on-cpu": Source(brings=a_mask_that_is_moved, line=88, lost_ms=3.0),
    "dataparallel": Source(brings=one_process_for_two_gpus, line=88),
    "fp32-on-tensor-cores": Source(brings=thirty_two_bits, lost_ms=30.0),
    "gpu-memory-growth": Source(brings=tensors_that_stay, seconds=50, subject="GPU"),
    "gpu-memory-fragmented": Source(brings=blocks_in_pieces),
    "throttled": Source(brings=a_hot_card, subject="GPU 0", lost_ms=0.5 * (1 - 990 / 1485) * 100),
    "numa-mismatch": Source(brings=cores_of_another_node, subject="rank 0"),
    "host-memory-growth": Source(brings=a_list_that_grows, seconds=50, subject="trainer"),
    "host-memory-growth of workers": Source(brings=workers_that_grow, seconds=300, subject="workers"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_the_sources_say_comes_to_the_rule(recorded: Callable[..., Any], name: str) -> None:
    source = SOURCES[name]

    def watched(well: bool) -> tuple[Finding, ...]:
        found: tuple[Finding, ...] = recorded().watch(
            source.seconds, lambda node, second: source.brings(node, second, well)
        )
        return found

    (found,) = watched(well=False)
    assert (found.rule, found.line, found.subject, found.ranks) == (name.split()[0], source.line, source.subject, (0,))
    assert 1e3 * found.seconds_per_step == pytest.approx(source.lost_ms, rel=0.05)
    assert watched(well=True) == ()


def test_a_node_that_is_well_has_no_findings(recorded: Callable[..., Any]) -> None:
    assert recorded(ranks=2).watch(60) == ()


def test_a_rank_is_matched_to_its_gpu_by_uuid_whatever_their_numbers(recorded: Callable[..., Any]) -> None:
    """Rank 0 computes on the second card, as CUDA_VISIBLE_DEVICES may have it: cores 4 to 7 are the near ones."""
    node = recorded()
    node.ranks[0].facts["device"]["uuid"] = "GPU-1"
    node.ranks[0].may_run_on("4-7")
    assert node.watch(20) == ()

    node.ranks[0].may_run_on("0-3")
    (found,) = node.watch(60)
    assert (found.rule, found.evidence["gpu_numa_node"], found.evidence["cpu_numa_nodes"]) == ("numa-mismatch", 1, "0")


def test_a_rank_on_a_mig_instance_is_matched_to_it_and_to_its_card(recorded: Callable[..., Any]) -> None:
    """CUDA tells the instance's UUID without a prefix, and the rank puts a card's before it.

    The tensor pipes are the instance's own, the node of the slot and the throttling are the second card's.
    """
    node = recorded()
    card = node.gpus[1]
    memory = {"nvmlDeviceGetMemoryInfo": (GIB, 16 * GIB), "nvmlDeviceGetGpuInstanceId": 7}
    card.instances = {0: Gpu("MIG-1f5c", answers=memory, fields={}, gpm={2: 80.0, 5: 0.0, 12: 60.0})}
    card.answers |= {
        "nvmlDeviceGetMigMode": pynvml.NVML_DEVICE_MIG_ENABLE,
        "nvmlDeviceGetUtilizationRates": NOT_SUPPORTED,
        "nvmlDeviceGetClockInfo": 990,
    }
    node.ranks[0].facts["device"]["uuid"] = "GPU-1f5c"

    def heats(node: Recorded, second: int) -> None:
        node.gpus[1].fields[75] = 500 * MS * second

    found = node.watch(20, heats)

    assert {(each.rule, each.subject) for each in found} == {
        ("fp32-on-tensor-cores", ""),
        ("numa-mismatch", "rank 0"),
        ("throttled", "GPU 1"),
    }


def test_what_a_rank_far_from_its_gpu_copies_is_in_the_evidence(recorded: Callable[..., Any]) -> None:
    def copies(node: Recorded, _: int) -> None:
        node.ranks[0].copies("h2d", "pinned", size_bytes=8 * MIB, blocked_ns=2 * MS)

    node = recorded()
    node.ranks[0].may_run_on("4-7")
    (found,) = node.watch(20, copies)

    assert found.evidence["copied_bytes_per_step"] == 8 * MIB
    assert found.evidence["copy_seconds_per_step"] == pytest.approx(0.002)
