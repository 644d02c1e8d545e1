"""Reads tune.json of a run directory: what `gpulaunch tune` has tried of the job, and what it gained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpulaunch.profiler.files import read_file

TUNE_FILE: Final = "tune.json"
VERSION: Final = 1
_MOST_BYTES: Final = 1 << 20
_MOST_TEXT: Final = 300
_MOST: Final = 20


def gain_text(median: float, low: float, high: float) -> str:
    """A gain in steps per second, with its bounds: `+38 % (31 .. 45)`."""
    return f"{100 * median:+.0f} % ({100 * low:.0f} .. {100 * high:.0f})"


def tried_in(run_dir: Path, notes: list[str]) -> tuple[str, ...]:
    """Return what gained, one line each; empty if the run was not tuned. The file may be damaged, or another's.

    Args:
        run_dir: the run directory.
        notes: receives a line if the file is there and cannot be read.
    """
    try:
        document: Any = json.loads(read_file(run_dir / TUNE_FILE, most_bytes=_MOST_BYTES))
        gains = [each for each in document["tried"] if each["verdict"] == "gain"]
        return tuple(_sentence(each) for each in gains[:_MOST])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        notes.append(f"{TUNE_FILE} cannot be read: {type(error).__name__}")
        return ()


def _sentence(tried: Mapping[str, Any]) -> str:
    name, where = (str(tried[key])[:_MOST_TEXT] for key in ("name", "where"))
    gain = gain_text(*(float(tried["gain_ratio"][bound]) for bound in ("median", "low", "high")))
    return f"tried: {name} ({where}): {gain} steps a second"
