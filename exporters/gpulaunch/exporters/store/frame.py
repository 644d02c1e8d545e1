"""One row of the file: all series of a node over one time interval; encodes, decodes and merges rows.

A frame has slots, not names: the table `series` maps series to slots and only ever grows, so a frame written before a
series was known is just shorter. As bytes, before zlib:

    counters    one float64 per slot: the newest value. All first bytes, then all second bytes, and so on: neighbours
                are alike in their high bytes, which zlib compresses well. Includes the gauges that are ordinals
                (`series.NUMBERS`): in older files, those are among the gauges
    gauges      one float32 per slot, likewise, in a frame of one sample; else three times as many: all minima,
                then all means, then all maxima. The relative error is up to 6e-8: 5 KiB of 80 GiB

A slot without a value is NaN. Counters that are not whole numbers are rounded to 1/16384, which is 61 us for seconds:
half of their bytes are then 0.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpulaunch.exporters.store.limits import MOST_SERIES

_NAN: Final = math.nan
_GRAIN: Final = 16384.0
_LARGEST: Final = 1 << 23  # beyond, rounding neither helps nor harms
_MOST_BYTES: Final = 20 * MOST_SERIES
"""8 for each counter and 12 for each gauge, at most."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The values of a node over one time interval."""

    begin_s: float
    end_s: float
    """Time of its newest sample (Unix time)."""
    run: int
    """A row of the table `run`: counters restart with each."""
    attempt: int | None
    looks: int
    """Number of samples it was made of."""
    counters: Sequence[float]
    lows: Sequence[float]
    means: Sequence[float]
    highs: Sequence[float]
    """One of each per gauge slot."""


def encode(frame: Frame) -> bytes:
    """Return the slots as bytes."""
    # Floors, not round(): they pass NaN through.
    counters = [
        value if value > _LARGEST or value == value // 1 else (value * _GRAIN + 0.5) // 1 / _GRAIN
        for value in frame.counters
    ]
    gauges = frame.means if frame.looks == 1 else [*frame.lows, *frame.means, *frame.highs]
    return zlib.compress(_apart(array("d", counters)) + _apart(array("f", map(_float32, gauges))), 1)


def decode(
    data: bytes, *, num_counters: int, begin_s: float, end_s: float, run: int, attempt: int | None, looks: int
) -> Frame:
    """Return the frame encoded in some bytes.

    Raises:
        ValueError: they are not a frame.
    """
    try:
        expander = zlib.decompressobj()
        raw = expander.decompress(data, _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"damaged frame: {error}") from None
    cut = 8 * num_counters
    if not expander.eof or not 0 <= cut <= len(raw) or (len(raw) - cut) % (4 if looks == 1 else 12):
        raise ValueError("damaged frame: its length is wrong")
    counters = _together("d", raw[:cut])
    gauges = _together("f", raw[cut:])
    if looks == 1:
        lows = means = highs = gauges
    else:
        third = len(gauges) // 3
        lows, means, highs = gauges[:third], gauges[third : 2 * third], gauges[2 * third :]
    return Frame(
        begin_s=begin_s,
        end_s=end_s,
        run=run,
        attempt=attempt,
        looks=looks,
        counters=counters,
        lows=lows,
        means=means,
        highs=highs,
    )


def fold(frames: Sequence[Frame]) -> Frame:
    """Merge consecutive frames of one run into one."""
    first, last = frames[0], frames[-1]
    counters = array("d", [_NAN]) * max(len(frame.counters) for frame in frames)
    size = max(len(frame.means) for frame in frames)
    lows, highs = array("d", [_NAN]) * size, array("d", [_NAN]) * size
    sums, weights = array("d", [0.0]) * size, array("d", [0.0]) * size
    for frame in frames:
        for slot, value in enumerate(frame.counters):
            if value == value:  # not NaN: the newest known value is kept
                counters[slot] = value
        looks = frame.looks
        for slot, (low, mean, high) in enumerate(zip(frame.lows, frame.means, frame.highs, strict=True)):
            if mean == mean:
                sums[slot] += mean * looks
                weights[slot] += looks
                if not lows[slot] <= low:
                    lows[slot] = low
                if not highs[slot] >= high:
                    highs[slot] = high
    means = array("d", [total / weight if weight else _NAN for total, weight in zip(sums, weights, strict=True)])
    return Frame(
        begin_s=first.begin_s,
        end_s=last.end_s,
        run=last.run,
        attempt=last.attempt,
        looks=max(2, sum(frame.looks for frame in frames)),  # a frame of one sample has another format
        counters=counters,
        lows=lows,
        means=means,
        highs=highs,
    )


def _float32(value: float) -> float:
    return value if abs(value) < 3e38 else _NAN  # NaN stays NaN


def _apart(values: array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    raw = values.tobytes()
    return b"".join(raw[start :: values.itemsize] for start in range(values.itemsize))


def _together(code: str, raw: bytes) -> array[float]:
    values: array[float] = array(code)
    width, count = values.itemsize, len(raw) // values.itemsize
    mixed = bytearray(len(raw))
    for start in range(width):
        mixed[start::width] = raw[start * count : (start + 1) * count]
    values.frombytes(bytes(mixed))
    if sys.byteorder == "big":
        values.byteswap()
    return values
