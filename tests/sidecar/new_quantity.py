"""A process in which one line of `channel.quantities` is new; prints where its value was found. Not a test module."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

LINE = '    made_up: int = counter("made_up_events_total", "Made up.")\n'
CLASS = "class Pauses:\n"


def add_the_line() -> None:
    """As an editor would, but for this process only: before anything else has imported the module."""
    spec = importlib.util.find_spec("gpulaunch.profiler.channel.quantities")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    begin = source.index("\n\n", source.index(CLASS)) + 2  # below its docstring
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(compile(source[:begin] + LINE + source[begin:], spec.origin, "exec"), module.__dict__)


def main(channel_dir: Path) -> None:
    """Measure it in a rank over two attempts, and look everywhere."""
    from gpulaunch.exporters.prometheus.catalogue import markdown
    from gpulaunch.exporters.prometheus.render import Board
    from gpulaunch.exporters.store.series import sample_of
    from gpulaunch.exporters.view.as_json import to_json
    from gpulaunch.exporters.view.live import view_of_state
    from gpulaunch.profiler.analysis.difference import between
    from gpulaunch.profiler.analysis.window import Snapshot
    from gpulaunch.profiler.channel.quantities import Pauses
    from gpulaunch.profiler.channel.segment_writer import SegmentWriter, create
    from gpulaunch.profiler.daemon.sidecar import Sidecar

    made_up: int = Pauses.made_up  # type: ignore[attr-defined]
    states: list[Any] = []
    sidecar = Sidecar(channel_dir, states.append)
    for attempt, measured in enumerate((3, 4)):
        create(str(channel_dir / "rank-0.bin"), rank=0, local_rank=0, attempt=attempt)
        group = {
            "version": 1,
            "run_id": "0123456789abcdef",
            "name": "made-up",
            "attempt": attempt,
            "world_size": 1,
            "node_rank": 0,
            "ranks": [{"rank": 0, "local_rank": 0, "pid": os.getpid()}],
        }
        (channel_dir / "group.json").write_text(json.dumps(group))
        writer = SegmentWriter(str(channel_dir / "rank-0.bin"))
        sidecar.refresh()
        writer.words[made_up] += measured  # the one place that measures it
        writer.end_step([attempt + 1, *[0] * 19], 0, 1, [0] * 14)
        sidecar.refresh()
        writer.close()
    board = Board(version="0")
    board.publish(states[-1])
    (rank,) = to_json(view_of_state(states[-1]))["ranks"]
    window = between(Snapshot(state=states[2]), Snapshot(state=states[3]))
    found = {
        "page": [line for line in board.metrics("")[1].decode().splitlines() if "made_up_events_total{" in line],
        "store": sample_of(states[-1]).counters["gpulaunch_made_up_events_total", "0"],
        "run.json": rank["metrics"]["made_up_events_total"],
        "window": [getattr(each.pauses, "made_up") for each in window.ranks],  # noqa: B009 - no checker knows it
        "docs": [line for line in markdown().splitlines() if "made_up" in line],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    add_the_line()
    main(Path(sys.argv[1]))
