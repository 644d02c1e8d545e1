"""Restarts: every attempt has a fresh store, its own files, and all ranks again."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

# Each attempt another rank dies in the middle of a collective; the last one goes through. torch 2.13's own launcher
# recovers 0 of 15 such jobs at 4 ranks, because the ranks find the dead ones' addresses in the store.
DYING = """
    import os, signal, torch, torch.distributed as dist
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for step in range(3):
        dist.all_reduce(torch.ones(1))
    if attempt < {deaths} and rank == attempt % dist.get_world_size():
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(3):
        total = torch.ones(1)
        dist.all_reduce(total)
    print("ATTEMPT", attempt, "RANK", rank, "TOTAL", int(total), flush=True)
"""
# A key written by one attempt must not be seen by the next, also when the port is the same.
STORE = """
    import os, torch.distributed as dist
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    assert not store.check(["left behind"]), "the store of an earlier attempt"
    dist.init_process_group("gloo")
    dist.barrier()
    store.set("left behind", "x")
    print("PORT", os.environ["MASTER_PORT"], flush=True)
    dist.barrier()
    if attempt < 2 and rank == 0:
        os._exit(9)
    dist.barrier() if attempt < 2 else None
"""


def script(path: Path, text: str) -> Path:
    file = path / "train.py"
    file.write_text(textwrap.dedent(text))
    return file


@pytest.mark.parametrize(("method", "ranks", "deaths"), [("fork", 2, 12), ("fork", 4, 12), ("spawn", 2, 2)])
def test_every_restart_recovers(gpulaunch, tmp_path: Path, method: str, ranks: int, deaths: int) -> None:
    program = script(tmp_path, DYING.replace("{deaths}", str(deaths)))

    ended = gpulaunch(
        "--nproc", str(ranks), "--start-method", method, "--max-restarts", str(deaths), program, timeout_s=240
    )

    assert ended.code == 0, ended
    done = [line.split("ATTEMPT ")[1] for line in ended.stdout.splitlines() if "ATTEMPT" in line]
    assert sorted(done) == [f"{deaths} RANK {rank} TOTAL {ranks}" for rank in range(ranks)]
    assert json.loads((ended.run_dir / "summary.json").read_text())["restarts"] == deaths


@pytest.mark.parametrize("port", [None, "29517"])
def test_each_attempt_has_a_fresh_store(gpulaunch, tmp_path: Path, port: str | None) -> None:
    options = [] if port is None else ["--master-port", port]

    ended = gpulaunch("--nproc", "2", "--max-restarts", "2", *options, script(tmp_path, STORE))

    assert ended.code == 0, ended
    ports = {line.split("PORT ")[1] for line in ended.stdout.splitlines() if "PORT" in line}
    assert ports == {port} if port else len(ports) == 3


def test_the_budget_is_kept_and_the_last_failure_is_the_exit_code(gpulaunch, tmp_path: Path) -> None:
    # The first to fail ends the other: none may, before both have said their line.
    failing = """
        import os, pathlib, time
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", attempt, flush=True)
        pathlib.Path(f"said-{attempt}-{os.environ['RANK']}").touch()
        while not all(os.path.exists(f"said-{attempt}-{rank}") for rank in range(2)):
            time.sleep(0.01)
        raise SystemExit(40)
    """

    ended = gpulaunch("--nproc", "2", "--max-restarts", "2", script(tmp_path, failing))

    assert ended.code == 40
    for attempt in range(3):
        for rank in range(2):
            log = ended.run_dir / f"attempts/{attempt}/rank-{rank}/stdout.log"
            assert log.read_text() == f"attempt {attempt}\n"
        assert (ended.run_dir / f"attempts/{attempt}/failure.json").exists()


def test_a_second_run_in_the_same_directory_overwrites_nothing(gpulaunch, tmp_path: Path) -> None:
    program = script(tmp_path, "import sys; print(sys.argv[1])")
    for word in ("first", "second"):
        assert gpulaunch("--job-dir", tmp_path / "job", "--nproc", "1", program, word).code == 0

    logs = [(tmp_path / f"job/attempts/{n}/rank-0/stdout.log").read_text() for n in (0, 1)]
    assert ["first\n", "second\n"] == logs


def test_a_killed_fork_server_is_replaced_for_the_next_attempt(gpulaunch, tmp_path: Path) -> None:
    killing = """
        import os, signal
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            agent = os.getppid()
            for child in open(f"/proc/{agent}/task/{agent}/children").read().split():
                if open(f"/proc/{child}/comm").read().strip() == "gpulaunch-fork":
                    os.kill(int(child), signal.SIGKILL)
            raise SystemExit(1)
        print("recovered")
    """
    ended = gpulaunch("--nproc", "1", "--max-restarts", "1", "--start-method", "fork", script(tmp_path, killing))

    assert ended.code == 0, ended
    assert "recovered" in ended.stdout


def test_when_the_store_is_killed_the_ranks_start_again_with_another(gpulaunch, tmp_path: Path) -> None:
    killing = """
        import os, signal, time, torch.distributed as dist
        dist.init_process_group("gloo")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if dist.get_rank() == 0:
                agent = os.getppid()
                for child in open(f"/proc/{agent}/task/{agent}/children").read().split():
                    if open(f"/proc/{child}/comm").read().strip() == "gpulaunch-store":
                        os.kill(int(child), signal.SIGKILL)
            time.sleep(600)
        dist.new_group([0, 1])  # asks the store
        dist.barrier()  # gloo fails where a peer ends before both are connected
        print("recovered")
    """
    ended = gpulaunch("--nproc", "2", "--max-restarts", "1", script(tmp_path, killing))

    assert ended.code == 0, ended
    assert ended.stdout.count("recovered") == 2
    assert "store" in ended.stderr
