"""A fault that lasts is told for as long as it does, however few steps the profiler observes."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.waits, pytest.mark.light, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("programs") / "too_few_workers.py"
RULE = "dataloader-too-few-workers"
LASTS_S, LOOKS_EVERY_S = 330.0, 5.0
FOUND_WITHIN_S = 180.0
RUNS: dict[str, tuple[str, ...]] = {"default": (), "nothing is cheap enough": ("--profile-budget", "0.01")}
"""With which options."""


class Live:
    """A run that goes on, and what it tells meanwhile."""

    def __init__(self, run: Any) -> None:
        run.wait_for("/metrics")
        (self._url,) = re.findall(r"http://\S+/metrics", run.stderr)
        self.run = run
        self.found_s: float | None = None
        """After so long it was told."""
        self.active: list[bool] = []
        """Whether it was told, at each look after that."""
        self.seen_s = 0.0
        self.unobserved = 0.0
        """Steps that were not observed."""

    def look(self, after_s: float) -> None:
        view = json.loads(_fetched(self._url.replace("/metrics", "/api/run.json")))
        is_active = any(each["rule"] == RULE and each["active"] for each in view["findings"])
        if is_active and self.found_s is None:
            self.found_s = after_s
        if self.found_s is not None:
            self.active.append(is_active)
        counts = re.findall(r"^gpulaunch_unobserved_steps_total\{.*\} (\S+)$", _fetched(self._url), re.MULTILINE)
        self.unobserved = sum(map(float, counts))
        self.seen_s = after_s


def _fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as page:
        return page.read().decode()


def test_a_data_bound_program_of_short_steps_keeps_its_finding(gpulaunch: Any, tmp_path: Path) -> None:
    """Steps of 20 ms, for 5.5 minutes. After half a minute not all steps are observed, where that would exceed the
    budget, which depends on the machine. It mostly waits."""
    words = (PROGRAM, "--faster", "2", "--seconds", str(LASTS_S))
    live = {
        how: Live(gpulaunch.start("--nproc", "1", "--job-dir", tmp_path / how, *options, *words))
        for how, options in RUNS.items()
    }
    began_s = time.monotonic()
    while (after_s := time.monotonic() - began_s) < LASTS_S - 2 * LOOKS_EVERY_S:
        for each in live.values():
            each.look(after_s)
        time.sleep(LOOKS_EVERY_S)

    for how, each in live.items():
        ended = each.run.wait()
        assert ended.code == 0, ended
        (step_ms,) = re.findall(r"step_ms ([\d.]+)", ended.stdout)
        assert 10.0 < float(step_ms) < 60.0, "these are not the steps that were meant"
        assert each.found_s is not None, how
        assert each.found_s < FOUND_WITHIN_S, how
        assert each.seen_s > 300, how
        assert each.active[-1], how
        assert each.active.count(True) > 0.9 * len(each.active), how  # others may have had the cores for a while
    assert live["nothing is cheap enough"].unobserved > 0, "everything was observed: nothing is tested"
