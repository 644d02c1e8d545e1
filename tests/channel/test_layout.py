"""The segment's layout: one table that everything else follows."""

from __future__ import annotations

from itertools import pairwise

from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.channel.layout import REGION_BITS, STEP_BUCKETS, Hook, Region, StepSource, TextSlot, Word


def test_nothing_overlaps_and_everything_fits():
    """Regions in segment order: each ends before the next begins."""
    longer = {
        Word.STEP_HISTOGRAM: STEP_BUCKETS,
        Word.LOADER_WAIT_HISTOGRAM: STEP_BUCKETS,
        Word.COPY_FIRST: layout.COPY_WORDS * len(layout.COPIES),
        Word.SYNC_FIRST: layout.SYNC_WORDS * len(layout.SYNCS),
    }
    regions = [(8 * word, 8 * (word + longer.get(word, 1))) for word in Word]
    regions.extend((slot, slot + 8 + 8 + layout.TEXT_BYTES + 8) for slot in TextSlot)
    regions.append((layout.RING_BYTE, layout.RING_BYTE + layout.RING_SLOTS * layout.RING_RECORD_BYTES))
    regions.append((layout.SITE_BYTE, layout.SITE_BYTE + layout.SITE_ROWS * layout.SITE_ROW_BYTES))
    regions.sort()

    assert all(end <= start for (_, end), (start, _) in pairwise(regions))
    assert regions[-1][1] <= layout.SEGMENT_BYTES
    assert layout.SITE_TEXT_BYTE + layout.SITE_TEXT_BYTES == layout.SITE_ROW_BYTES


def test_the_phases_are_words_in_their_order():
    first = Word.DATA_WAIT_NS_TOTAL
    names = [Word(first + index).name for index in range(len(layout.PHASES))]

    assert names == [f"{phase.upper()}_NS_TOTAL" for phase in layout.PHASES]
    assert Word.OTHER_NS_TOTAL == first + len(layout.PHASES) - 1
    assert layout.RING_RECORD_BYTES // 8 >= 3 + len(layout.PHASES) - 1 + 1


def test_version_6_is_what_it_was():
    """Another process reads these numbers: to change one is to change VERSION, and this test with it."""
    assert layout.VERSION == 6
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
        "H2D_NS_TOTAL": 23,
        "FORWARD_NS_TOTAL": 24,
        "BACKWARD_NS_TOTAL": 25,
        "COMM_NS_TOTAL": 26,
        "OPTIMIZER_NS_TOTAL": 27,
        "SYNC_NS_TOTAL": 28,
        "CHECKPOINT_NS_TOTAL": 29,
        "COMPILE_NS_TOTAL": 30,
        "GC_NS_TOTAL": 31,
        "VALIDATION_NS_TOTAL": 32,
        "OTHER_NS_TOTAL": 33,
        "LAST_STEP_MONOTONIC_NS": 34,
        "STEP_SOURCE": 35,
        "PROBE_NS_TOTAL": 36,
        "CLOSING": 37,
        "LAST_EDGE": 40,
        "STEPS_MADE": 43,
        "FIRST_STEP_START_NS": 41,
        "FIRST_STEP_END_NS": 42,
        "LOADER_BATCHES": 48,
        "LOADER_WORKERS_CONFIGURED": 49,
        "LOADER_OUTSTANDING": 50,
        "LOADER_READY": 51,
        "LOADER_REORDER_BLOCKED": 52,
        "LOADER_PIN_BACKLOG": 53,
        "LOADER_WAIT_NS_TOTAL": 54,
        "LOADER_TRANSFER_NS_TOTAL": 55,
        "LOADER_BLOCKED_NS_TOTAL": 56,
        "LOADER_BATCH_BYTES_TOTAL": 57,
        "LOADER_EVAL_BATCHES": 58,
        "GC_COLLECTIONS": 60,
        "GC_PAUSE_NS_TOTAL": 61,
        "COMPILES": 62,
        "COMPILE_PAUSE_NS_TOTAL": 63,
        "COMM_CALLS": 64,
        "COMM_BLOCKED_NS_TOTAL": 65,
        "DDP_COMM_NS": 66,
        "DDP_OVERLAP_NS": 67,
        "GPU_ALLOCATED_BYTES": 72,
        "GPU_PEAK_ALLOCATED_BYTES": 73,
        "GPU_RESERVED_BYTES": 74,
        "GPU_PEAK_RESERVED_BYTES": 75,
        "GPU_ACTIVE_BYTES": 76,
        "GPU_INACTIVE_SPLIT_BYTES": 77,
        "GPU_ALLOC_RETRIES": 78,
        "GPU_OOMS": 79,
        "GPU_PINNED_BYTES": 80,
        "GPU_TIMED_STEPS": 84,
        "GPU_STEP_NS_TOTAL": 85,
        "GPU_FORWARD_NS_TOTAL": 86,
        "GPU_BACKWARD_NS_TOTAL": 87,
        "GPU_OPTIMIZER_NS_TOTAL": 88,
        "CHECKPOINT_SAVES": 92,
        "CHECKPOINT_FAILURES": 93,
        "CHECKPOINT_STALL_NS_TOTAL": 94,
        "CHECKPOINT_LAST_STALL_NS": 95,
        "CHECKPOINT_BYTES_TOTAL": 96,
        "CHECKPOINT_STEP": 97,
        "CHECKPOINT_CAPTURED_NS": 98,
        "CHECKPOINT_BLOCKING_SINCE_NS": 99,
        "RESUMED_STEP": 100,
        "LISTENS": 101,
        "LEFT_GROUP_NS": 102,
        "BUDGET_PPM": 104,
        "HOOKS_SHED": 105,
        "UNOBSERVED_STEPS": 106,
        "PRICED_PAIRS": 107,
        "PAIRED_COST_NS": 108,
        "PAIRED_ERROR_NS": 109,
        "STEP_HISTOGRAM": 112,
        "LOADER_WAIT_HISTOGRAM": 128,
        "COPY_FIRST": 224,
        "SYNC_FIRST": 244,
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
        ("VALIDATION", 7),
    ]
    assert [hook.name for hook in Hook] == [
        "DATALOADER",
        "BACKWARD",
        "OPTIMIZER",
        "LOADER_QUEUE",
        "SAMPLES",
        "GPU_MEMORY",
        "GPU_MEMORY_FRACTION",
        "NESTED",
        "COPIES",
        "SYNCS",
        "WORKERS",
        "FACTS",
        "GPU_TIME",
        "EVERY_STEP",
    ]


def test_the_kinds_of_copies_syncs_and_sites_are_what_they_were():
    assert layout.COPIES == (
        ("h2d", "pageable"),
        ("h2d", "pinned"),
        ("d2h", "pageable"),
        ("d2h", "pinned"),
        ("d2d", ""),
    )
    assert layout.SYNCS == ("item", "tolist", "numpy", "cpu", "bool", "nonzero", "synchronize", "other")
    assert layout.SITE_KINDS == (
        *("elsewhere", "h2d", "d2h", "d2d", "item", "tolist", "numpy", "cpu", "bool", "nonzero", "synchronize"),
        *("built_on_cpu", "loader", "dataparallel", "save", "collective", "gc"),
    )


def test_the_duration_buckets_grow_from_1_ms_to_2_minutes():
    assert layout.STEP_BOUNDS_S == tuple(sorted(layout.STEP_BOUNDS_S))
    assert (layout.STEP_BOUNDS_S[0], layout.STEP_BOUNDS_S[-1]) == (0.001, 120.0)
    assert len(layout.STEP_BOUNDS_S) == 14


def test_an_edge_fits_into_its_word():
    """A machine would have to run for 73 years to need more bits than are left for the time."""
    assert max(Region) < 1 << REGION_BITS
    assert 73 * 365 * 24 * 3600 * 10**9 << REGION_BITS < 1 << 64
