"""Two nodes, which here are two launchers on one machine: one world, one fresh store per attempt, one end."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path

import pytest

from ports import free_port

pytestmark = pytest.mark.torch


def start_both(gpulaunch, tmp_path: Path, text: str, *options: str, nprocs: tuple[int, int] = (2, 2), local=((), ())):
    """`local`: options of each node of its own."""
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(text))
    port = str(free_port())
    return [
        gpulaunch.start(
            *("--nnodes", "2", "--node-rank", str(node), "--nproc", str(nprocs[node])),
            *("--master-addr", "127.0.0.1", "--master-port", port, "--job-dir", tmp_path / "job"),
            *options,
            *local[node],
            program,
        )
        for node in (1, 0)
    ][::-1]


SUM = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    env = os.environ
    print("SUM", int(total), "OF", env["WORLD_SIZE"], env["RANK"], env["GROUP_RANK"], env["LOCAL_RANK"], flush=True)
"""


@pytest.mark.parametrize("nprocs", [(2, 2), (1, 2)])
def test_all_ranks_of_both_nodes_meet(gpulaunch, tmp_path: Path, nprocs: tuple[int, int]) -> None:
    """Nodes may run different numbers of ranks, as under torchrun."""
    nodes = [run.wait() for run in start_both(gpulaunch, tmp_path, SUM, nprocs=nprocs)]

    assert [0, 0] == [node.code for node in nodes], nodes
    world = sum(nprocs)
    said = sorted(line.split("SUM ")[1] for node in nodes for line in node.stdout.splitlines() if "SUM" in line)
    expected = [f"{sum(range(world))} OF {world} {rank} 0 {rank}" for rank in range(nprocs[0])]
    expected += [f"{sum(range(world))} OF {world} {nprocs[0] + rank} 1 {rank}" for rank in range(nprocs[1])]
    assert expected == said


DYING = """
    import os, signal, torch, torch.distributed as dist
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if attempt < 4 and rank == attempt:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
    print("ATTEMPT", attempt, "TOTAL", int(total), flush=True)
"""


def test_whichever_rank_of_whichever_node_dies_all_restart_together(gpulaunch, tmp_path: Path) -> None:
    nodes = [run.wait() for run in start_both(gpulaunch, tmp_path, DYING, "--max-restarts", "4")]

    assert [0, 0] == [node.code for node in nodes], nodes
    for node in nodes:
        assert node.stdout.count("ATTEMPT 4 TOTAL 4") == 2


def test_when_the_budget_is_spent_both_nodes_end_and_the_failing_one_names_the_cause(gpulaunch, tmp_path: Path) -> None:
    failing = """
        import os, time
        if os.environ["RANK"] == "3":
            raise ValueError("only I know")
        time.sleep(600)
    """
    here, there = (run.wait() for run in start_both(gpulaunch, tmp_path, failing, "--max-restarts", "1"))

    assert there.code == 1
    report = json.loads((tmp_path / "job/node-1/attempts/1/failure.json").read_text())
    assert report["first"]["rank"] == 3
    assert here.code == 1, "one exit code on all nodes"
    assert "node 1 (" in here.stderr
    assert "rank 3 (local rank 1, " in here.stderr
    assert ") raised ValueError: only I know" in here.stderr, here


def test_of_a_hang_the_other_node_is_told_what_hangs(gpulaunch, tmp_path: Path) -> None:
    stopping = """
        import os, signal, time
        print("READY", flush=True)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        if os.environ["RANK"] == "0":
            raise SystemExit(0)
        time.sleep(600)
    """
    here, there = (run.wait() for run in start_both(gpulaunch, tmp_path, stopping, "--on-hang", "stop"))

    assert [here.code, there.code] == [124, 124], here
    told = [line for line in there.stderr.splitlines() if "node 0 (" in line]
    assert all(": the ranks hang: rank 1 " in line for line in told), told
    assert "first cause, on another node: node 0 (" in told[-1]


EVALUATES = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for _ in range(50):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            time.sleep(0.01)

    def evaluate():
        until_s = time.monotonic() + 45.0
        while time.monotonic() < until_s:
            {work}
        open("evaluated", "w").close()

    def poll():
        while {polls} and not os.path.exists("evaluated"):
            time.sleep(1.0)

    train()
    evaluate() if dist.get_rank() == 0 else poll()
    train()
    print("DONE", flush=True)
"""


WORKS = "sum(range(100_000)), time.sleep(0.01)"


@pytest.mark.waits
@pytest.mark.parametrize(
    ("work", "polls", "codes"),
    [(WORKS, False, [0, 0]), (WORKS, True, [0, 0]), ("time.sleep(600)", False, [124, 124])],
    ids=["waited for in a collective", "waited for by polling", "rests"],
)
def test_a_rank_that_works_on_one_node_is_waited_for_on_the_other(
    gpulaunch, tmp_path: Path, work: str, polls: bool, codes: list[int]
) -> None:
    """Longer than --hang-timeout; and one that rests is named by both nodes."""
    program = EVALUATES.replace("{work}", work).replace("{polls}", str(polls))
    ended = [run.wait() for run in start_both(gpulaunch, tmp_path, program, "--hang-timeout", "15")]

    assert codes == [node.code for node in ended], "\n".join(map(str, ended))
    if codes == [0, 0]:
        assert [2, 2] == [node.stdout.count("DONE") for node in ended]
        assert ("ranks 2-3 are in train.py:" if polls else "for a rank of another node: no progress") in ended[1].stderr
    else:
        assert "first cause, on another node: node 0 (" in ended[1].stderr
        assert "rank 0 is in train.py:" in ended[1].stderr


def test_when_a_node_is_gone_the_other_ends_its_ranks(gpulaunch, tmp_path: Path) -> None:
    waiting = "import os, time; print('READY', os.environ['RANK'], flush=True); time.sleep(600)"
    here, there = start_both(gpulaunch, tmp_path, waiting, "--max-restarts", "3")
    for run in (here, there):
        run.wait_until(lambda run: run.stdout.count("READY") == 2)

    os.kill(there.pid, signal.SIGKILL)
    there.wait()
    ended = here.wait()

    assert ended.code == 75, "another machine would help, and there need not be a checkpoint"
    assert "node 1" in ended.stderr


def test_ctrl_c_on_one_node_ends_both(gpulaunch, tmp_path: Path) -> None:
    waiting = "import os, time; print('READY', os.environ['RANK'], flush=True); time.sleep(600)"
    here, there = start_both(gpulaunch, tmp_path, waiting)
    for run in (here, there):
        run.wait_until(lambda run: run.stdout.count("READY") == 2)

    there.signal(signal.SIGINT)

    assert there.wait().code == 130
    assert here.wait().code != 0


# Saves a step at a time on rank 0; rank 3, on the other node, dies in the middle of the first attempt.
RESUMING = """
    import os, sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    start = torch.load(sys.argv[2])["step"] if len(sys.argv) > 2 else 0
    for step in range(start + 1, 6):
        if rank == 0:
            torch.save({"step": step}, os.path.join(os.environ["GPULAUNCH_CHECKPOINT_DIR"], f"ckpt_{step}.pt"))
        dist.barrier()
        if step == 3 and rank == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(9)
        dist.barrier()
    print("FROM", os.path.basename(os.environ.get("GPULAUNCH_RESUME_FROM", "none")), start, flush=True)
"""


def test_both_nodes_go_on_from_the_same_checkpoint(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "job" / "checkpoints").mkdir(parents=True)

    options = ["--max-restarts", "1", "--resume-arg", "--resume {path}"]
    nodes = [run.wait() for run in start_both(gpulaunch, tmp_path, RESUMING, *options)]

    assert [0, 0] == [node.code for node in nodes], nodes
    for node in nodes:
        assert node.stdout.count("FROM ckpt_3.pt 3") == 2, node


TELLS = """
    import os
    print("FROM", os.path.basename(os.environ.get("GPULAUNCH_RESUME_FROM", "none")), flush=True)
"""


@pytest.mark.parametrize(
    ("steps", "both_have_step_100", "from_what"),
    [((200, 100), False, "none"), ((200, 100), True, "step_100.pt"), ((200, 200), False, "last.pt")],
)
def test_checkpoints_of_one_name_on_the_nodes_own_disks_are_one_only_where_their_steps_are(
    gpulaunch, tmp_path: Path, steps: tuple[int, int], both_have_step_100: bool, from_what: str
) -> None:
    """What one says of its step is in the file. No two nodes go on from different steps: else from the start."""
    import torch

    for node, step in enumerate(steps):
        disk = tmp_path / f"disk-{node}"
        disk.mkdir()
        torch.save({"step": step}, disk / "last.pt")
        if both_have_step_100:
            torch.save({"step": 100}, disk / "step_100.pt")
            os.utime(disk / "step_100.pt", (1e9, 1e9))
    options = ["--start-method", "spawn", "--no-profile"]
    local = [["--checkpoint-dir", os.fspath(tmp_path / f"disk-{node}")] for node in (0, 1)]

    nodes = [run.wait() for run in start_both(gpulaunch, tmp_path, TELLS, *options, nprocs=(1, 1), local=local)]

    assert [0, 0] == [node.code for node in nodes], nodes
    assert [from_what] * 2 == [node.stdout.partition("FROM ")[2].strip() for node in nodes], nodes
    for node, step in zip(nodes, steps, strict=True):
        said = f"no checkpoint is the same on every node; the newest on this node is last.pt (step {step})"
        assert (said in node.stderr) == (from_what == "none"), node


SAVES_WHEN_TOLD = """
    import os, signal, sys, time, torch
    def save(*_):
        path = os.path.join(os.environ["GPULAUNCH_CHECKPOINT_DIR"], f"ckpt_rank_{os.environ['RANK']}_1.pt")
        torch.save({"step": 1}, path)
        print("SAVED", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGUSR1, save)
    print("READY", flush=True)
    time.sleep(60)
"""


def test_a_notice_to_one_node_makes_both_save_and_end_with_75(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "job" / "checkpoints").mkdir(parents=True)
    here, there = start_both(
        gpulaunch, tmp_path, SAVES_WHEN_TOLD, "--max-restarts", "3", "--checkpoint-pattern", "*.pt"
    )
    for run in (here, there):
        run.wait_until(lambda run: run.stdout.count("READY") == 2)

    there.signal(signal.SIGUSR1)
    ended = [here.wait(), there.wait()]

    assert [75, 75] == [node.code for node in ended], "\n".join(map(str, ended))
    assert [2, 2] == [node.stdout.count("SAVED") for node in ended]


def test_a_node_that_goes_during_a_pause_is_what_ended_the_job(gpulaunch, tmp_path: Path) -> None:
    """And not the failure before the pause, whose report is written already."""
    failing = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '0' else time.sleep(60)"
    here, there = start_both(gpulaunch, tmp_path, failing, "--max-restarts", "9", "--no-progress-limit", "0")
    here.wait_for("waiting 2 s")

    os.kill(there.pid, signal.SIGKILL)
    there.wait()
    ended = here.wait()

    assert ended.code == 75, ended
    assert "error: node 1 (" in ended.stderr
    assert "is lost" in ended.stderr
    assert "FAILED" not in ended.stderr


def test_a_node_that_goes_while_there_is_a_checkpoint_means_run_it_again(gpulaunch, tmp_path: Path) -> None:
    (tmp_path / "job" / "checkpoints").mkdir(parents=True)
    here, there = start_both(gpulaunch, tmp_path, SAVES_AND_WAITS, "--max-restarts", "9")
    for run in (here, there):
        run.wait_until(lambda run: run.stdout.count("READY") == 2)

    os.kill(there.pid, signal.SIGKILL)
    there.wait()
    ended = here.wait()

    assert ended.code == 75, ended
    assert "check that machine" in ended.stderr


SAVES_AND_WAITS = """
    import os, time, torch
    torch.save({"step": 1}, os.path.join(os.environ["GPULAUNCH_CHECKPOINT_DIR"], "ckpt_1.pt"))
    print("READY", flush=True)
    time.sleep(60)
"""
