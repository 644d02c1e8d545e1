"""Runs that were: of `programs/steps.py`, recorded as `record.py` does it, as their views. Not a test module.

Each batch comes `--late-ms` late, on two cores that other people used meanwhile: hardly (`calm`), or most of the time
(`crowded`, `full`). What has the same name but `-again` is the same program again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpulaunch.exporters.view.as_json import from_json
from gpulaunch.exporters.view.model import NodeView, RunView


@dataclass(frozen=True, kw_only=True)
class Recorded:
    view: RunView
    job: dict[str, Any]


def recorded(name: str) -> Recorded:
    content = json.loads((Path(__file__).parent / "recorded" / f"{name}.json").read_text())
    view = from_json(content["view"])
    node = under(content["crowding"], len(view.times_s))
    return Recorded(view=replace(view, nodes=(node,)), job=content["job"])


def under(crowding: dict[str, float], points: int = 1) -> NodeView:
    """A node of which the mean over the run is known."""
    return NodeView(
        node=0,
        values={"cores_allowed": crowding["cores_allowed"]},
        cpu_pressure_ratio=(crowding["pressure_ratio"],) * points,
        cores_used=(crowding["cores_used"],) * points,
    )
