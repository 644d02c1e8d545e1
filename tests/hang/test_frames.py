"""What names on a stack mean, and the golden sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulaunch.launcher.hang import frames as stacks
from gpulaunch.launcher.hang.judge import judge
from gpulaunch.launcher.hang.values import Limits, RankProgress, Sample, to_json, verdict_from
from gpulaunch.profiler.channel.layout import Region
from gpulaunch.profiler.stack import Frame

TORCH = "/venv/lib/python3.11/site-packages/torch"


def at(name: str, file: str, line: int = 1) -> Frame:
    return Frame(name, file, line)


@pytest.mark.parametrize(
    ("deepest", "call"),
    [
        (at("barrier", f"{TORCH}/distributed/distributed_c10d.py"), "barrier"),
        (at("_store_based_barrier", f"{TORCH}/distributed/distributed_c10d.py"), "_store_based_barrier"),
        (at("_sync_buffers", f"{TORCH}/nn/parallel/distributed.py"), "_sync_buffers"),
        (at("_wait_for_tensor", f"{TORCH}/distributed/_functional_collectives.py"), "_wait_for_tensor"),
        (at("_engine_run_backward", f"{TORCH}/autograd/graph.py"), "backward"),
        (at("write_data", f"{TORCH}/distributed/checkpoint/filesystem.py"), ""),
        (at("_wait_all_workers", f"{TORCH}/distributed/rpc/api.py"), ""),
        (at("run", f"{TORCH}/distributed/run.py"), ""),
        (at("barrier", "/home/me/train.py"), ""),
        (at("forward", f"{TORCH}/nn/modules/linear.py"), ""),
    ],
)
def test_what_waits_for_other_ranks(deepest: Frame, call: str) -> None:
    assert stacks.waits_in((deepest, at("<module>", "/home/me/train.py"))) == call


def test_a_tap_of_the_profilers_is_no_place() -> None:
    """Of a real stack: Work.wait itself has no Python frame. What the profiler does by itself is one."""
    ours = "/venv/lib/python3.11/site-packages/gpulaunch/profiler/probe"
    tap = at("_tap.<locals>.tapped", f"{ours}/collectives.py", 139)
    torchs = (
        at("recv", f"{TORCH}/distributed/distributed_c10d.py", 2799),
        at("_exception_logger.<locals>.wrapper", f"{TORCH}/distributed/c10d_logger.py", 83),
    )
    users = at("<module>", "/home/me/train.py", 8)

    assert stacks.without_taps((tap, *torchs, tap, users)) == (*torchs, users)
    assert stacks.waits_in((*torchs, users)) == "recv"
    forward = at("_tap_module.<locals>.tapped", f"{ours}/edges.py", 39)
    assert stacks.without_taps((forward, users)) == (users,)
    own = (at("Recorder.look", f"{ours}/recorder.py", 64), users)
    assert stacks.without_taps(own) == own
    assert stacks.without_taps((at("tapped", "/home/me/bar.py"),)) == (at("tapped", "/home/me/bar.py"),)


def test_who_waits_for_a_work_of_its_own_is_told_by_the_tap() -> None:
    """`work = dist.irecv(...)`, then `work.wait()`: below the program's line is C++, and on top of it our tap."""
    tap = at("tapped", "/venv/lib/python3.11/site-packages/gpulaunch/profiler/probe/collectives.py", 139)
    stack = stacks.without_taps((tap, at("<module>", "/home/me/train.py", 8)))

    assert stacks.waits_in(stack) == "Work.wait"
    assert stacks.describe(stack) == "train.py:8 wait()"
    assert not stacks.is_users(stack[0])


@pytest.mark.parametrize(
    ("name", "file", "pauses"),
    [
        ("validate", "/home/me/train.py", True),
        ("Trainer._run_eval_epoch", "/home/me/train.py", True),
        ("saveCheckpoint", "/home/me/train.py", True),
        ("save", f"{TORCH}/serialization.py", True),
        ("compile_fx", f"{TORCH}/_inductor/compile_fx.py", True),
        ("train_and_evaluate", "/home/me/train.py", False),
        ("training_step", "/home/me/train.py", False),
        ("interval", "/home/me/train.py", False),
        ("evaluate", "/venv/lib/python3.11/site-packages/some/lib.py", False),
    ],
)
def test_what_may_rightly_take_minutes(name: str, file: str, pauses: bool) -> None:
    assert stacks.is_pause((at("read", "/usr/lib/python3.11/socket.py"), at(name, file))) is pauses


@pytest.mark.parametrize(
    ("file", "prompt"),
    [
        ("/usr/lib/python3.11/pdb.py", True),
        ("/home/me/code.py", False),
        ("/venv/lib/python3.11/site-packages/IPython/core/magic.py", False),
    ],
)
def test_a_prompt_is_told_from_a_program_of_that_name(file: str, prompt: bool) -> None:
    assert stacks.is_prompt((at("interact", file), at("<module>", "/home/me/train.py"))) is prompt


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("/home/me/train.py", True),
        ("/venv/lib/python3.11/site-packages/trainer/sender.py", True),
        ("<string>", True),
        ("/usr/lib/python3.11/threading.py", False),
        (f"{TORCH}/utils/data/_utils/pin_memory.py", False),
        ("/venv/lib/python3.11/site-packages/gpulaunch/profiler/probe/edges.py", False),
        ("<frozen importlib._bootstrap>", False),
    ],
)
def test_a_thread_of_an_installed_package_is_the_programs(file: str, counts: bool) -> None:
    assert stacks.is_programs(at("run", file)) is counts


def test_what_a_dataset_calls_its_functions_is_no_pause() -> None:
    loader = at("_next_data", f"{TORCH}/utils/data/dataloader.py")

    assert not stacks.is_pause((at("sample", "/home/me/data.py"), loader, at("main", "/home/me/train.py")))
    assert stacks.is_pause((at("sample", "/home/me/data.py"), loader, at("validate", "/home/me/train.py")))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("handle = open(path)", "train.py:1 open()"),
        ("return self.sock.recv(4)", "train.py:1 recv()"),
        ("value = float(open(path).read())", "train.py:1 `value = float(open(path).read())`"),
        ("while True: pass", "train.py:1 `while True: pass`"),
        ("this is no python", "train.py:1 `this is no python`"),
        ("", "train.py:1 in load()"),
    ],
)
def test_a_c_function_has_no_frame_but_a_line(tmp_path: Path, line: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{line}\n")

    assert stacks.describe((at("load", str(script)),)) == said


def test_a_source_that_cannot_be_read_costs_little(tmp_path: Path) -> None:
    """It may lie on the file system that hangs; a pipe hangs too."""
    pipe = tmp_path / "train.py"
    os.mkfifo(pipe)

    assert stacks.describe((at("load", str(pipe)),)) == "train.py:1 in load()"
    assert stacks.describe((at("load", "/nonexistent/x.py"),)) == "x.py:1 in load()"


def test_the_users_frame_is_shown_with_what_it_called() -> None:
    lock = at("FileLock.acquire", "/venv/lib/python3.11/site-packages/locks/api.py")
    deeper = at("wait", "/usr/lib/python3.11/threading.py")

    assert stacks.describe((deeper, lock, at("load", "/home/me/data.py", 12))) == "data.py:12 acquire()"
    assert stacks.describe((deeper, lock)) == "threading.py:1 wait()"
    assert stacks.describe(()) == "an unknown place"


def test_the_golden_sentence(tmp_path: Path) -> None:
    """Rank 3 opens a pipe that nobody writes to, and the others wait for it."""
    script = tmp_path / "train.py"
    script.write_text("\n" * 87 + "batch = open(pipe)\n")
    main = at("<module>", str(script), 100)
    waits = (
        at("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 3252),
        at("_exception_logger.<locals>.wrapper", f"{TORCH}/distributed/c10d_logger.py", 83),
        main,
    )
    ranks = [0, 1, 2, 4, 5, 6, 7]
    seen = {rank: [Sample(at_s=float(s), state="S", frames=waits) for s in range(0, 40, 2)] for rank in ranks}
    seen[3] = [Sample(at_s=float(s), state="S", frames=(at("load", str(script), 88), main)) for s in range(0, 40, 2)]
    standings = [
        RankProgress(
            rank=rank, pid=rank + 1, region=Region.LOADER if rank == 3 else Region.STEPPING, steps=4, armed=True,
            begun=True, saving=False, quiet_s=40.0, allowed_s=10.0, stopped_s=0.0,
        )
        for rank in range(8)
    ]  # fmt: skip

    verdict = judge(standings, seen, Limits(), whole=True)

    assert verdict.sentence == "rank 3 is in train.py:88 open(), ranks 0-2,4-7 wait for it in all_reduce"
    assert verdict.odd == (3,)
    assert verdict_from(to_json(verdict)) == verdict
