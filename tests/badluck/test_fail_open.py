"""Every collector can fail by itself: it says so, and the others do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import pytest
from bad_node import Refreshes

from gpulaunch.launcher.cli.collectors import collectors
from gpulaunch.profiler.record import Collector

# Where the sidecar has what a collector is made of, and the call that is made each second.
CALLS = {
    Collector.RANKS: ("_ranks", "read"),
    Collector.PROCESS: ("_processes", "read"),
    Collector.HOST: ("_host", "read"),
    Collector.RUN: ("_run", "read"),
    Collector.GPU: ("_nvml.health", "read"),
    Collector.DEVICE: ("_nvml.gpus", "read"),
    Collector.WORKERS: ("_workers", "read"),
    Collector.COLLECTIVES: ("_collectives", "read"),
    Collector.STACKS: ("_stacks", "read"),
    Collector.FINDINGS: ("_findings", "look"),
    Collector.LEDGER: ("_ledger", "save"),
}


class UnheardOfError(Exception):
    """What nobody has thought of."""


@pytest.fixture
def refreshes(tmp_path: Path) -> Iterator[Refreshes]:
    made = Refreshes(tmp_path)
    yield made
    made.close()


def failing(refreshes: Refreshes) -> dict[Collector, str]:
    """The collectors out of service after a refresh, and why."""
    found = refreshes.refresh().collectors
    return {each: how.reason for each, how in found.items() if not how.available}


def test_no_collector_is_forgotten_here() -> None:
    assert set(CALLS) == set(Collector) - {Collector.STORE}, "that one is not the loop's: tests/store"


@pytest.mark.parametrize("collector", CALLS)
def test_a_collector_that_fails_says_so_and_the_others_go_on(
    refreshes: Refreshes, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = failing(refreshes)

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise UnheardOfError

    with monkeypatch.context() as patch:
        owner, call = CALLS[collector]
        patch.setattr(attrgetter(owner)(refreshes.sidecar), call, fail)
        during = failing(refreshes)
        errors = refreshes.scrape().value("gpulaunch_collector_errors_total", collector=collector.value)
    after = failing(refreshes)

    assert during == {**before, collector: "UnheardOfError"}
    assert errors == 1
    assert after == before
    if collector is not Collector.RANKS:
        assert refreshes.scrape().value("gpulaunch_steps_total") == 150


def test_the_doctor_names_every_collector() -> None:
    assert {finding.name for finding in collectors()} == {f"collector {collector.value}" for collector in Collector}
