"""docs/faults.md, made from the table of the tests: `python tests/faults/fault_page.py` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fault_rows import ROWS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"

_HEAD = """\
# Faults

How a job handles faults. Each row is a test: the command in the last column injects the fault into a small DDP program
with 2 to 4 ranks and checks the expected result. Every test also checks that:

- no process, socket or file of the job is left behind;
- a restarted job uses the same samples and has bitwise the same losses as an uninterrupted one ("same result");
- the time from the last step before the fault to the first one after it is at most three times what the settings allow
  (`--failure-grace`, and the time of hang detection) plus the job's first start.

[Ranks that hang](exit-codes.md#ranks-that-hang) lists when a hang is reported and acted on, including
`--first-step-timeout` and the cases that are never acted on.

The exit code in parentheses applies when no restart is left.

| fault | expected result | what gpulaunch does | exit code | command |
|---|---|---|---|---|
"""
_NODES = (
    ("a rank is killed on another node", "all ranks restart; every node names it", "a_rank_that_is_killed_on_another"),
    (
        "a node's cable is cut, or it is powered off",
        "within 15 s the others make steps without it; it takes part again when it is back",
        "go_on_without_a_silent_node",
    ),
    ("a link is down, or an agent is stopped, for 5 s", "nothing happens", "a_flap_and_a_pause"),
    ("20 % of the packets are lost, for 30 s", "nothing happens", "a_fifth_of_the_packets"),
    (
        "a link works in one direction only",
        "as if it were cut, whichever direction it is",
        "a_link_that_works_in_one_direction",
    ),
    ("nodes come late, the leader's last", "the job grows", "nodes_that_come_late"),
    ("a node is lost while a spare waits", "the spare takes its rank within 15 s", "a_spare_takes_the_seat"),
    ("a node's agent is killed", "within 6 s the others make steps without it", "an_agent_that_is_killed"),
    ("the leader's agent is killed and started again", "the job goes on", "the_agent_of_the_leader_comes_back"),
    ("the leader's node is lost for good", "the others exit with 75 after `away_timeout`", "without_a_leader"),
    (
        "with etcd: the node that decides, then the first node and its member of etcd are powered off",
        "the others make steps without it within 15 s, and 20 s",
        "the_loss_of_the_decider",
    ),
    (
        "with etcd: its leader and a rank are killed at the same time, then a link is down for 5 s",
        "one restart, within 12 s",
        "the_leader_of_etcd_is_killed",
    ),
    (
        "with etcd: a node is cut off together with a member",
        "its ranks are ended before the others go on; it takes part again when it is back",
        "a_node_that_is_cut_off_ends_its_ranks",
    ),
    (
        "with etcd: two of three members are killed, or stopped",
        "the ranks train on; or are ended, and begin anew when etcd is back",
        "without_a_majority",
    ),
    (
        "with etcd: the agent that decides is killed",
        "within 8 s the others make steps without it",
        "can_be_run_again_at_once",
    ),
    ("a crash loop that moves from node to node", "one budget, one exit code", "one_budget_and_one_exit_code"),
    (
        "a rank raises, and its connections close seconds before it ends",
        "the exception is the first cause on every node",
        "every_node_knows_the_exception",
    ),
    ("SIGTERM to the agent of one node", "it leaves, the others go on", "a_node_that_is_asked_to_end"),
    (
        "SIGTERM, with ranks that save",
        "all save, it leaves, the others go on; exit code 75 below MIN nodes",
        "all_save_with_a_node",
    ),
    (
        "fixed node ranks: a node is cut off, or node 0's agent is killed",
        "the job ends with 75 on every node, within 15 s and 6 s",
        "a_fixed_group_ends",
    ),
    (
        "fixed node ranks: a link is down, or an agent is stopped, for 5 s",
        "nothing happens",
        "a_fixed_group_restarts_and_outlives",
    ),
    ("a forged node, without the token", "it is not heard", "a_forged_node"),
    ("a node with another token, or none", "it says so and ends", "a_node_with_another_token"),
    ("garbage and slow connections at the leader's port", "nothing happens", "garbage_slow_and_endless"),
    ("a host whose name means 127.0.1.1", "the job forms at once", "names_that_mean_127"),
    (
        "DDP, and a node that is cut off and comes back",
        "it goes on from a checkpoint each time",
        "goes_on_from_a_checkpoint_without_a_node",
    ),
    ("DDP, and rank 0's node is powered off", "rank 0 moves, and saves there", "rank_0_moves_to_another_host"),
    (
        "DDP with `--replicate`, and rank 0's node is powered off while a spare waits",
        "the spare receives the checkpoint from the other node, and the job goes on from there",
        "a_spare_goes_on_from_the_checkpoint",
    ),
)
"""Faults of jobs of several nodes: what happens, the result, and its test in tests/multinode."""

_SLURM = (
    (
        "a node is lost, with `srun --no-kill` and `--nnodes 1:2`",
        "the other one goes on in the same allocation; exit code 0",
        "without_a_node",
    ),
    ("a node is lost", "Slurm requeues the job, which uses the same run directory", "without_a_node"),
    ("a rank fails on one node", "all ranks restart; every task ends with its exit code", "a_failure_on_one_node"),
    ("the time limit comes near, or `scancel`", "the ranks save; the next run goes on from there", "the_ranks_save"),
)
"""Faults under a real Slurm, with tests in tests/slurm."""

_TAIL = """
"needs root": the test mounts a small tmpfs, or creates a memory cgroup.

`python tests/faults/nemesis.py` injects several random faults of these kinds into a job and checks invariants that hold
for any order; the same seed gives the same faults. `gpulaunch chaos` injects faults into your own job:
`gpulaunch chaos kill-rank 3`; `gpulaunch chaos help` lists the rest.

`python tests/faults/fault_page.py` generates this page.
"""


def page() -> str:
    """docs/faults.md."""
    lines = [_HEAD.rstrip("\n")]
    for row in ROWS:
        code = str(row.code) if row.cause in (None, row.code) else f"{row.code} ({row.cause})"
        root = "; needs root" if row.root else ""
        lines.append(f"| {row.fault} | {row.holds} | {row.does} | {code} | `{row.command}`{root} |")
    lines += ["", "## Several nodes", "", "On two or three hosts made of network namespaces; all need root."]
    lines += ["", "| fault | expected result | command |", "|---|---|---|"]
    lines += [f"| {fault} | {holds} | `pytest tests/multinode -k {test}` |" for fault, holds, test in _NODES]
    lines += ["", "Under Slurm, which needs to be installed, and root:", "", "| fault | expected result | command |"]
    lines += ["|---|---|---|"]
    lines += [f"| {fault} | {holds} | `pytest tests/slurm -k {test}` |" for fault, holds, test in _SLURM]
    return "\n".join(lines) + "\n" + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{len(ROWS)} rows in {PAGE.relative_to(ROOT)}")
