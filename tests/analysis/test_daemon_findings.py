"""A fault that the sidecar sees from refresh to refresh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from made_up_node import Node, device

from gpulaunch.profiler.analysis import advisor
from gpulaunch.profiler.analysis.rules import RULES
from gpulaunch.profiler.analysis.window import Window
from gpulaunch.profiler.daemon.findings import Findings
from gpulaunch.profiler.daemon.sidecar import Sidecar
from gpulaunch.profiler.record import GpuState, NodeState


def test_a_sidecar_that_takes_over_judges_when_it_has_seen_enough(tmp_path: Path) -> None:
    """Until then what the one before it has found still stands; the first one of a run has none before it."""
    seen: list[NodeState] = []
    for _ in range(2):
        sidecar = Sidecar(tmp_path, seen.append)
        sidecar.refresh()
        sidecar.close()
    assert [state.judged for state in seen] == [True, False]

    findings, node = Findings(root=tmp_path), Node()
    judged = []
    for _ in range(17):
        findings.look(node.train(1.0).state)
        judged.append(findings.judged)
    assert judged == sorted(judged)
    assert (judged[6], judged[-1]) == (False, True)


@pytest.mark.parametrize(("gc_ms", "rules"), [(0.5, []), (30.0, ["gc-pauses"])])
def test_a_fault_is_found_in_ten_seconds_of_steps_and_goes_when_it_is_over(
    tmp_path: Path, gc_ms: float, rules: list[str]
) -> None:
    findings, node = Findings(root=tmp_path), Node()

    def found(seconds: int, gc_ms: float) -> list[str]:
        for _ in range(seconds):
            node.ranks[0].gc += 10
            standing = findings.look(node.train(1.0, gc=gc_ms).state)
        return [each.rule for each in standing]

    assert found(7, gc_ms) == []
    assert found(10, gc_ms) == rules
    assert found(400, 0.5) == []


@pytest.mark.parametrize(("gc_ms", "rules"), [(0.5, []), (12.0, []), (60.0, ["gc-pauses"])])
def test_a_short_run_is_judged_once_at_its_end(tmp_path: Path, gc_ms: float, rules: list[str]) -> None:
    """By the steps after its warm-up, and only of what is clear."""
    findings, node = Findings(root=tmp_path), Node()
    for _ in range(5):
        node.ranks[0].gc += 10
        assert findings.look(node.train(1.0, gc=gc_ms).state) == ()
    node.now_s += 30.0  # the rank has ended, its sidecar not yet
    findings.look(node.look().state)

    found = findings.conclude()

    assert [each.rule for each in found] == rules
    assert all(each.confidence == 0.4 and each.evidence["judged_steps"] == 30 for each in found)
    assert all("Judged by 30 steps only" in each.advice for each in found)


def test_what_may_happen_once_is_not_judged_by_a_short_run(tmp_path: Path) -> None:
    """A single compilation, of the last and smaller batch."""
    findings, node = Findings(root=tmp_path), Node()
    for second in range(6):
        findings.look(node.train(1.0, compile=300.0 if second == 4 else 0.0).state)

    assert findings.conclude() == ()


@pytest.mark.parametrize("seconds", [1, 3])
def test_a_run_of_a_moment_is_not_judged(tmp_path: Path, seconds: int) -> None:
    findings, node = Findings(root=tmp_path), Node()
    for _ in range(seconds):
        findings.look(node.train(1.0, gc=60.0).state)

    assert findings.conclude() == ()


def test_the_end_changes_nothing_of_a_run_that_has_been_judged(tmp_path: Path) -> None:
    findings, node = Findings(root=tmp_path), Node()
    for _ in range(20):
        node.ranks[0].gc += 10
        standing = findings.look(node.train(1.0, gc=30.0).state)

    assert [each.rule for each in standing] == ["gc-pauses"]
    assert findings.conclude() == standing


@pytest.mark.parametrize(("gc_ms", "rules"), [(200.0, ["gc-pauses"]), (40.0, [])], ids=["clear", "not clear"])
def test_what_only_the_last_window_has_is_told_if_it_is_clear(tmp_path: Path, gc_ms: float, rules: list[str]) -> None:
    """In all of a run of two windows, which has no third one that could have it, too."""
    findings, node = Findings(root=tmp_path), Node()
    for second in range(15):
        node.ranks[0].gc += 10
        standing = findings.look(node.train(1.0, gc=gc_ms if second > 6 else 0.5).state)

    assert (findings.judged, standing) == (True, ())
    assert [each.rule for each in findings.conclude()] == rules


def test_where_a_rank_may_run_is_asked_where_it_matters_and_now_and_then(tmp_path: Path) -> None:
    """On a machine with one node, or without a GPU, it does not; and a rank may bind itself after it has started."""
    status = tmp_path / "proc/100/status"
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        cpulist = tmp_path / f"sys/devices/system/node/node{node}/cpulist"
        cpulist.parent.mkdir(parents=True)
        cpulist.write_text(f"{cpus}\n")
    status.parent.mkdir(parents=True)
    findings, node = Findings(root=tmp_path), Node()
    gpu = device(numa_node=0)
    node.ranks[0].facts = {"device": {"uuid": gpu.uuid}}

    def found(cpus: str, *devices: GpuState, seconds: int = 36) -> list[str]:
        status.write_text(f"Cpus_allowed_list:\t{cpus}\n")
        node.devices = devices
        for _ in range(seconds):
            standing = findings.look(node.train().state)
        return [each.rule for each in standing]

    assert found("4-5") == found("4-5", replace(gpu, numa_node=None)) == []
    assert found("0-7", gpu) == []
    assert found("4-5", gpu, seconds=60) == ["numa-mismatch"]
    assert found("0-3", gpu, seconds=60) == []

    node.attempt = 1
    assert found("4-5", gpu, seconds=20) == ["numa-mismatch"]


@pytest.mark.parametrize("fails", [True, False])
def test_a_rule_that_fails_is_told_once_and_the_others_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def judge(_: Window) -> NoReturn:
        raise ZeroDivisionError

    rules = [replace(rule, judge=judge) if fails and rule.id == "straggler" else rule for rule in RULES]
    monkeypatch.setattr(advisor, "RULES", tuple(rules))
    findings, node = Findings(root=tmp_path), Node()
    troubles: list[str] = []
    for _ in range(60):
        node.ranks[0].gc += 10
        standing = findings.look(node.train(1.0, gc=30.0).state)
        troubles.extend(findings.troubles())

    assert [each.rule for each in standing] == ["gc-pauses"]
    assert troubles == (["rule straggler: ZeroDivisionError"] if fails else [])
