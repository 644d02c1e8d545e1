"""Runs that were: recorded with `programs/steps.py`, as their views. Not a test module.

    gpulaunch --nproc 1 tests/compare/programs/steps.py --seconds 45 --late-ms 20

Each batch comes `--late-ms` late, on two cores that other people used meanwhile: hardly (`calm`), or most of the time
(`crowded`, `full`). What has the same name but `-again` is the same program again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulaunch.exporters.report.crowding import Crowding
from gpulaunch.exporters.view.document import from_json
from gpulaunch.exporters.view.model import RunView


@dataclass(frozen=True, kw_only=True)
class Recorded:
    view: RunView
    job: dict[str, Any]
    crowding: Crowding


def recorded(name: str) -> Recorded:
    content = json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text())
    return Recorded(view=from_json(content["view"]), job=content["job"], crowding=Crowding(**content["crowding"]))
