"""What was done to a run from outside stands in its own history."""

from __future__ import annotations

import json
from pathlib import Path

from gpulaunch.launcher.runs.events_log import note


def test_a_line_is_added(tmp_path: Path) -> None:
    history = tmp_path / "events.jsonl"
    history.write_text('{"event": "start"}\n')
    note(str(tmp_path), "chaos", what="x\ny", rank=1)

    start, line = map(json.loads, history.read_text().splitlines())
    assert start == {"event": "start"}
    assert (line["version"], line["event"], line["what"], line["rank"]) == (1, "chaos", "x\ny", 1)
    assert {"time_s", "monotonic_s"} <= line.keys()


def test_no_history_is_begun(tmp_path: Path) -> None:
    note(str(tmp_path), "chaos")
    note(str(tmp_path / "nowhere"), "chaos")

    assert list(tmp_path.iterdir()) == []
