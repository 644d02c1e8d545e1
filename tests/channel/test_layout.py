"""The segment's layout: one table that everything else follows."""

from __future__ import annotations

from itertools import pairwise

from gpulaunch.profiler.channel import layout, segment_writer
from gpulaunch.profiler.channel.declare import counter, layout_id, quantities_of, table_row
from gpulaunch.profiler.channel.layout import REGION_BITS, STEP_BUCKETS, Hook, Region, StepSource, TextSlot, Word
from gpulaunch.profiler.channel.quantities import COPY_WORDS, LAYOUT, RECORDS, SYNC_WORDS


def test_nothing_overlaps_and_everything_fits():
    """Regions in segment order: each ends before the next begins."""
    longer = {
        Word.STEP_HISTOGRAM: STEP_BUCKETS,
        Word.LOADER_WAIT_HISTOGRAM: STEP_BUCKETS,
        Word.COPY_FIRST: COPY_WORDS * len(layout.COPIES),
        Word.SYNC_FIRST: SYNC_WORDS * len(layout.SYNCS),
    }
    regions = [(8 * word, 8 * (word + longer.get(word, 1))) for word in Word]
    own = {each.word: each.width for record in RECORDS for each in quantities_of(record) if each.word not in set(Word)}
    regions.extend((8 * at, 8 * (at + width)) for at, width in own.items())
    assert all(layout.QUANTITIES_FIRST <= at < layout.QUANTITIES_END for at in own)
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


def test_version_8_is_what_it_was():
    """Another process reads these numbers: to change one is to change VERSION, and this test with it."""
    assert layout.VERSION == 8
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
        "LISTENS": 101,
        "LEFT_GROUP_NS": 102,
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
    ]


def test_other_quantities_are_another_version():
    """A rank and a reader of different releases must not take one counter for another."""

    @table_row
    class Before:
        calls: int = counter()
        blocked_ns: int = counter()

    @table_row
    class After:
        blocked_ns: int = counter()
        calls: int = counter()

    assert layout_id([Before]) != layout_id([After])
    assert layout_id([Before]) == layout_id([Before])
    assert segment_writer.VERSION == layout.VERSION << 32 | LAYOUT


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
        *("built_on_cpu", "loader", "dataparallel", "save", "collective", "gc", "small_collective"),
    )


def test_the_duration_buckets_grow_from_1_ms_to_2_minutes():
    assert layout.STEP_BOUNDS_S == tuple(sorted(layout.STEP_BOUNDS_S))
    assert (layout.STEP_BOUNDS_S[0], layout.STEP_BOUNDS_S[-1]) == (0.001, 120.0)
    assert len(layout.STEP_BOUNDS_S) == 14


def test_an_edge_fits_into_its_word():
    """A machine would have to run for 73 years to need more bits than are left for the time."""
    assert max(Region) < 1 << REGION_BITS
    assert 73 * 365 * 24 * 3600 * 10**9 << REGION_BITS < 1 << 64
