"""A /proc that hides things, and a sidecar without rights: what is lost is said, and the rest goes on.

Real sidecars, each in a mount namespace of its own.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_node import Node, Scrape

pytestmark = pytest.mark.root

RANK = str(Path(__file__).with_name("nobodys_rank.py"))
STEPS = "gpulaunch_steps_total"
RSS = "gpulaunch_host_memory_bytes"
MEMORY = "gpulaunch_node_memory_bytes"
PRESSURE = "gpulaunch_node_pressure_seconds_total"
Start = Callable[..., Scrape]

WHOLE = "mount -t proc proc /proc"
INVISIBLE = "mount -t proc -o hidepid=invisible,gid=54321 proc /proc"
NO_ACCESS = "mount -t proc -o hidepid=noaccess,gid=54321 proc /proc"
PROCESSES_ONLY = "mount -t proc -o subset=pid proc /proc"
NOTHING = "mount -t tmpfs tmpfs /proc"


def behind(mount: str, *, powerless: bool) -> tuple[str, ...]:
    """A command that becomes the one after it, in a mount namespace with this /proc.

    Powerless: without CAP_SYS_PTRACE, on which what root may see of others depends.
    """
    without = "setpriv --bounding-set=-sys_ptrace --inh-caps=-sys_ptrace -- " if powerless else ""
    return ("unshare", "--mount", "sh", "-c", f'{mount} && exec {without}"$@"', "sh")


@pytest.fixture
def start(node: Node) -> Start:
    """Start a rank of nobody's and a sidecar behind a mount; give a scrape after some refreshes."""

    def started(mount: str, *, powerless: bool = False) -> Scrape:
        if not (shutil.which("unshare") and shutil.which("setpriv")):
            pytest.skip("needs unshare and setpriv")
        prefix = behind(mount, powerless=powerless)
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
            pytest.skip(f"this kernel does not know `{mount}`")
        node.attempt(0, program=RANK)
        node.ranks[0].tell("step 5")
        # The first look at a stack comes after half a second; three in a row that fail are told as a reason.
        node.start_sidecar(*prefix)
        node.wait_for(5, STEPS)
        node.ranks[0].tell("step 2")
        node.wait_for(7, STEPS)
        return node.wait_for_refreshes(3)

    return started


def test_a_sidecar_that_may_see_everything_says_nothing(start: Start, node: Node) -> None:
    """What the others are compared with."""
    scrape = start(WHOLE)

    assert scrape.out_of_service <= {"gpu", "device"}
    assert scrape.value("gpulaunch_collector_errors_total") == 0
    assert scrape.value(RSS, rank="0", kind="rss")
    assert scrape.value(MEMORY, state="total")


@pytest.mark.parametrize(
    ("mount", "why"),
    [
        (INVISIBLE, "rank 0: /proc does not show its process"),
        (NO_ACCESS, "rank 0: Operation not permitted"),
    ],
    ids=["invisible", "no access"],
)
def test_processes_that_are_hidden_are_not_told_as_nothing(start: Start, node: Node, mount: str, why: str) -> None:
    scrape = start(mount, powerless=True)

    assert "process" in scrape.out_of_service
    assert why in node.says()
    assert scrape.value(RSS) is None, "not zero: it is not known"
    assert scrape.value(MEMORY, state="total")
    assert not scrape.out_of_service & {"ranks", "host", "workers", "findings", "ledger"}


def test_stacks_that_may_not_be_read_are_said_to_be_missing(start: Start, node: Node) -> None:
    """Another user's process, and no right to ptrace: what Yama and containers do to everybody."""
    start(WHOLE, powerless=True)
    scrape = node.wait_until(lambda now: "stacks" in now.out_of_service)

    assert "Operation not permitted" in node.says() or "permission denied" in node.says()
    assert scrape.value("gpulaunch_stack_samples_total") in (None, 0)
    assert scrape.out_of_service <= {"gpu", "device", "stacks"}
    assert scrape.value(RSS, rank="0", kind="rss"), "how large it is, everybody may know"


def test_a_proc_with_processes_only_costs_the_nodes_figures(start: Start, node: Node) -> None:
    scrape = start(PROCESSES_ONLY)

    assert "pressure: No such file or directory" in node.says() or "node memory: No such file" in node.says()
    assert (scrape.value(MEMORY), scrape.value(PRESSURE)) == (None, None)
    assert scrape.value(RSS, rank="0", kind="rss")
    assert not scrape.out_of_service & {"ranks", "process", "host", "findings"}


def test_without_any_proc_the_ranks_are_told_all_the_same(start: Start, node: Node) -> None:
    scrape = start(NOTHING)

    assert "process" in scrape.out_of_service
    assert "rank 0: /proc does not show its process" in node.says()
    assert (scrape.value(RSS), scrape.value("gpulaunch_sidecar_memory_bytes")) == (None, None)
    assert not scrape.out_of_service & {"ranks", "host", "workers", "findings", "ledger"}
    assert scrape.value("gpulaunch_phase_seconds_total", rank="0") == pytest.approx(0.07)
