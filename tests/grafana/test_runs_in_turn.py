"""Two runs at one announced address, one after the other: what the dashboards show of the second is its own.

The questions are those of the dashboards, with the variables in their places; promtool asks them of made-up series.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from exprs import queries
from scene import Target

from needed import program

FIRST_S, GAP_S, STEP_S = 600, 30, 15
"""How long the first run runs; how long nobody is there; how often it is looked."""
RANGE = "30m"
AT = "20m"


@pytest.fixture(scope="session")
def promtool() -> str:
    return program("promtool", package="prometheus")


def ran(run: str, **grows: float) -> list[dict[str, str]]:
    """The series of a run whose counters grow by so much in a second: steps, their time, lost work, productive time."""
    looks = FIRST_S // STEP_S
    first = run == "first"
    before, after = ("", " stale") if first else (f"_x{looks + 1 + GAP_S // STEP_S} ", "")
    target = f'job="gpulaunch",instance="n1:9464",run="{run}",node="n1",name="train"'
    goodput = "gpulaunch_goodput_seconds_total"
    series = {
        f'gpulaunch_run_info{{{target},exported_run="t-{run}",node_rank="0",world_size="1"}}': "1",
        f'gpulaunch_profiler_overhead_seconds_total{{{target},where="sidecar"}}': f"0+{0.1 * STEP_S:g}",
        f'gpulaunch_step_duration_seconds_sum{{{target},rank="0"}}': f"0+{STEP_S}",
        f'gpulaunch_step_duration_seconds_count{{{target},rank="0"}}': f"0+{grows['steps'] * STEP_S:g}",
        f'{goodput}{{{target},bucket="productive"}}': f"0+{grows['productive'] * STEP_S:g}",
        f'{goodput}{{{target},bucket="lost_work"}}': f"0+{grows['lost_work'] * STEP_S:g}",
    }
    return [{"series": each, "values": f"{before}{values}x{looks}{after}"} for each, values in series.items()]


def asked(dashboard: str, panel: str, legend: str, **chosen: str) -> str:
    """A question of a panel, as Grafana puts it for the second run."""
    (expr,) = [
        each.expr for each in queries() if (each.dashboard, each.panel, each.legend) == (dashboard, panel, legend)
    ]
    second = Target(run="second", node="n1:9464", **chosen)
    return second.into(expr.replace("$__range", RANGE).replace("$__rate_interval", "15m"))


def told(promtool: str, directory: Path, questions: dict[str, float]) -> None:
    """The answers, 20 minutes after the first run has begun."""
    story: dict[str, Any] = {
        "interval": f"{STEP_S}s",
        "input_series": ran("first", steps=10, productive=0.1, lost_work=0.9)
        + ran("second", steps=1, productive=1, lost_work=0),
        "promql_expr_test": [
            {
                "expr": f"round({expr}, 0.001)",
                "eval_time": AT,
                "exp_samples": [{"labels": "{}", "value": value}],
            }
            for expr, value in questions.items()
        ],
    }
    (directory / "story.yml").write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [story]}))

    ended = subprocess.run(
        [promtool, "test", "rules", directory / "story.yml"], capture_output=True, text=True, timeout=60
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_what_the_run_before_did_is_not_shown_of_this_one(promtool: str, tmp_path: Path) -> None:
    """It lost nine tenths of its time and made ten steps a second; this one loses nothing and makes one."""
    questions = {
        asked("overview", "Goodput", "productive"): 1.0,
        asked("recovery", "Goodput", "productive"): 1.0,
        asked("recovery", "Lost work", "lost"): 0.0,
        asked("overview", "Step time", "mean"): 1.0,
    }

    told(promtool, tmp_path, questions)


def test_without_the_targets_run_it_would_be(promtool: str, tmp_path: Path) -> None:
    """The same story, and a question that does not keep to it: what the test above is about does happen."""
    goodput = asked("overview", "Goodput", "productive").replace('run=~"second|"', 'run=~".*"')

    with pytest.raises(AssertionError, match=r"got: \{\}"):
        told(promtool, tmp_path, {goodput: 1.0})


def test_what_a_sidecar_takes_is_shown_whichever_rank_is_chosen(promtool: str, tmp_path: Path) -> None:
    """It is no rank's: the series has none. A tenth of a core, in 555 of the last 900 seconds."""
    told(promtool, tmp_path, {asked("cost", "Cores of the sidecars", "cores", rank="0"): 0.062})
