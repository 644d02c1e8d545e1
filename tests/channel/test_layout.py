"""The page's layout: one table that everything else follows."""

from __future__ import annotations

from itertools import pairwise

from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.channel.layout import REGION_BITS, STEP_BUCKETS, Hook, Region, StepSource, TextSlot, Word


def test_nothing_overlaps_and_everything_fits():
    """Regions in page order: each ends before the next begins, and the ring ends with the page."""
    regions = [(8 * word, 8 * (word + 1)) for word in Word if word is not Word.STEP_HISTOGRAM]
    regions.append((8 * Word.STEP_HISTOGRAM, 8 * (Word.STEP_HISTOGRAM + STEP_BUCKETS)))
    regions.extend((slot, slot + 8 + 8 + layout.TEXT_BYTES + 8) for slot in TextSlot)
    regions.append((layout.RING_BYTE, layout.RING_BYTE + layout.RING_SLOTS * layout.RING_RECORD_BYTES))
    regions.sort()

    assert all(end <= start for (_, end), (start, _) in pairwise(regions))
    assert regions[-1][1] == layout.PAGE_BYTES


def test_version_2_is_what_it_was():
    """Another process reads these numbers: to change one is to change VERSION, and this test with it."""
    assert layout.VERSION == 2
    assert layout.MAGIC.to_bytes(8, "little") == b"gpulpage"
    assert {word.name: int(word) for word in Word} == {
        "MAGIC": 0,
        "VERSION": 1,
        "RANK": 2,
        "LOCAL_RANK": 3,
        "ATTEMPT": 4,
        "ANCHOR_MONOTONIC_NS": 5,
        "ANCHOR_REALTIME_NS": 6,
        "PID": 7,
        "STARTED_NS": 8,
        "HOOKS_ARMED": 9,
        "HOOKS_UNAVAILABLE": 10,
        "OPENING": 16,
        "STEPS": 17,
        "MICROSTEPS": 18,
        "SKIPPED_STEPS": 19,
        "SAMPLES": 20,
        "STEP_NS_TOTAL": 21,
        "DATA_WAIT_NS_TOTAL": 22,
        "FORWARD_NS_TOTAL": 23,
        "BACKWARD_NS_TOTAL": 24,
        "OPTIMIZER_NS_TOTAL": 25,
        "OTHER_NS_TOTAL": 26,
        "LAST_STEP_MONOTONIC_NS": 27,
        "STEP_SOURCE": 28,
        "PROBE_NS_TOTAL": 29,
        "CLOSING": 30,
        "LAST_EDGE": 31,
        "FIRST_STEP_START_NS": 32,
        "FIRST_STEP_END_NS": 33,
        "LOADER_BATCHES": 40,
        "LOADER_WORKERS_CONFIGURED": 41,
        "LOADER_OUTSTANDING": 42,
        "LOADER_READY": 43,
        "LOADER_REORDER_BLOCKED": 44,
        "GPU_ALLOCATED_BYTES": 56,
        "GPU_PEAK_ALLOCATED_BYTES": 57,
        "GPU_RESERVED_BYTES": 58,
        "CHECKPOINT_SAVES": 64,
        "CHECKPOINT_FAILURES": 65,
        "CHECKPOINT_STALL_NS_TOTAL": 66,
        "CHECKPOINT_LAST_STALL_NS": 67,
        "CHECKPOINT_BYTES_TOTAL": 68,
        "CHECKPOINT_STEP": 69,
        "CHECKPOINT_CAPTURED_NS": 70,
        "CHECKPOINT_BLOCKING_SINCE_NS": 71,
        "RESUMED_STEP": 72,
        "LISTENS": 73,
        "STEP_HISTOGRAM": 96,
    }
    assert [(source.name, int(source)) for source in StepSource] == [
        ("NONE", 0),
        ("OPTIMIZER", 1),
        ("BACKWARD", 2),
        ("DATALOADER", 3),
        ("MARK", 4),
    ]
    assert [(region.name, int(region)) for region in Region] == [
        ("NONE", 0),
        ("LOADER", 1),
        ("FORWARD", 2),
        ("BACKWARD", 3),
        ("STEPPING", 4),
        ("OPTIMIZER", 5),
        ("OTHER", 6),
    ]
    assert [hook.name for hook in Hook] == [
        "DATALOADER",
        "BACKWARD",
        "OPTIMIZER",
        "LOADER_QUEUE",
        "SAMPLES",
        "GPU_MEMORY",
        "GPU_MEMORY_FRACTION",
    ]


def test_the_duration_buckets_grow_from_1_ms_to_2_minutes():
    assert layout.STEP_BOUNDS_S == tuple(sorted(layout.STEP_BOUNDS_S))
    assert (layout.STEP_BOUNDS_S[0], layout.STEP_BOUNDS_S[-1]) == (0.001, 120.0)
    assert len(layout.STEP_BOUNDS_S) == 14


def test_an_edge_fits_into_its_word():
    """A machine would have to run for 73 years to need more bits than are left for the time."""
    assert max(Region) < 1 << REGION_BITS
    assert 73 * 365 * 24 * 3600 * 10**9 << REGION_BITS < 1 << 64
