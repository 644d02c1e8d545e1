"""--replicate on real ranks: two nodes on loopback, each with a checkpoint directory of its own."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.checkpoint.manifest import MANIFEST, read, verify
from ports import free_port

pytestmark = pytest.mark.torch

# Rank 0 and rank 3 are on different nodes. At step 4 of the first attempt the copies of each node are changed as the
# test wants, and a rank fails.
PROGRAM = """
    import os, pathlib, torch, torch.distributed as dist
    from gpulaunch.checkpoint import Checkpoint

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = {wrap}(torch.nn.Linear(300, 300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = Checkpoint(model=model, optimizer=optimizer, every=1)
    print("RESUMED", ckpt.resume(), flush=True)
    for step in ckpt.steps(6):
        optimizer.zero_grad()
        model(torch.full((2, 300), float(step))).sum().backward()
        optimizer.step()
        ckpt.step()
        if step == 4 and os.environ["GPULAUNCH_ATTEMPT"] == "0":
            ckpt.wait()
            if os.environ["LOCAL_RANK"] == "0":
                there = pathlib.Path(ckpt.directory)
                exec({damage}[int(os.environ["GROUP_RANK"])])
            dist.barrier()
            if dist.get_rank() == 3 and not os.path.isfile(ckpt.directory):
                raise ValueError("fails")
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    print("TOTAL", sum(p.double().sum().item() for p in whole), flush=True)
"""
DDP, SHARDED = "torch.nn.parallel.DistributedDataParallel", "torch.distributed.fsdp.fully_shard"
KEEPS = "pass"
LOSES = "import shutil; shutil.rmtree(there)"
BREAKS = "there.rename(there.with_suffix('.gone')); there.write_text('')"
DAMAGES = "(there / 'step-000000000004' / 'gpulaunch-shared.pt').write_bytes(b'x' * 10)"
FLIPS_A_BIT = """
largest = max((there / 'step-000000000004').glob('*.distcp'), key=lambda path: path.stat().st_size)
content = bytearray(largest.read_bytes())
content[len(content) // 2] ^= 1
largest.write_bytes(content)
"""


def start_both(
    gpulaunch: Any,
    tmp_path: Path,
    damage: tuple[str, str],
    *,
    dirs: tuple[str, str] = ("here", "there"),
    wrap: str = DDP,
) -> list[Any]:
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(PROGRAM).replace("{damage}", repr(damage)).replace("{wrap}", wrap))
    port = str(free_port())
    return [
        gpulaunch.start(
            *("--nnodes", "2", "--node-rank", str(node), "--nproc", "2", "--max-restarts", "1", "--replicate"),
            *("--master-addr", "127.0.0.1", "--master-port", port, "--job-dir", tmp_path / f"job-{node}"),
            *("--checkpoint-dir", tmp_path / dirs[node]),
            program,
        )
        for node in (0, 1)
    ]


@pytest.mark.parametrize(
    ("damage", "wrap", "resumed"),
    [
        ((KEEPS, LOSES), DDP, 4),
        ((LOSES, KEEPS), SHARDED, 4),
        ((DAMAGES, KEEPS), DDP, 4),
        ((FLIPS_A_BIT, LOSES), DDP, 3),
        ((FLIPS_A_BIT, DAMAGES), DDP, 3),
    ],
    ids=["node 1 is new", "node 0 is new, sharded", "damaged on one", "the newest is damaged", "damaged on both"],
)
def test_a_checkpoint_that_any_node_has_whole_is_enough(
    gpulaunch: Any, tmp_path: Path, damage: tuple[str, str], wrap: str, resumed: int
) -> None:
    ended = [run.wait() for run in start_both(gpulaunch, tmp_path, damage, wrap=wrap)]

    shown = "\n".join(f"{each}" for each in ended)
    assert [each.code for each in ended] == [0, 0], shown
    for each in ended:
        assert each.stdout.count(f"RESUMED {resumed}\n") == 2, shown
    (total,) = {found for each in ended for found in re.findall(r"TOTAL \S+", each.stdout)}
    here, there = (tmp_path / name / "step-000000000006" for name in ("here", "there"))
    verify(str(here))
    assert (here / MANIFEST).read_bytes() == (there / MANIFEST).read_bytes()
    verify(str(there))
    assert read(str(here)).world_size == 4
    for name in ("here", "there"):
        assert not list((tmp_path / name).glob(".saving-*"))
    assert float(total.split()[1]) == pytest.approx(undisturbed(), rel=1e-6)


def test_a_node_that_cannot_write_is_named_and_no_other_commits_either(gpulaunch: Any, tmp_path: Path) -> None:
    ended = [run.wait() for run in start_both(gpulaunch, tmp_path, (KEEPS, BREAKS))]

    shown = "\n".join(f"{each}" for each in ended)
    assert [each.code for each in ended] == [1, 1], shown
    assert f"step 5 could not be saved in {tmp_path / 'here'}: " in ended[0].stderr, shown
    assert "Not a directory (node 1); training continues" in ended[0].stderr, shown
    there = tmp_path / "there"
    why = f"the checkpoint of step 4 cannot be copied: {there} could not be claimed (node 1)"
    assert why in ended[0].stderr, shown
    assert f"could not be saved in {there}: Not a directory" in ended[1].stderr, shown
    assert max(path.name for path in (tmp_path / "here").glob("step-*")) == "step-000000000004"


def undisturbed() -> float:
    """The sum of the parameters after six steps in a row; equal gradients on all ranks have the same mean."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(1, 7):
        optimizer.zero_grad()
        model(torch.full((2, 300), float(step))).sum().backward()
        optimizer.step()
    return float(sum(p.double().sum().item() for p in model.parameters()))


def test_in_a_directory_that_all_share_it_changes_nothing(gpulaunch: Any, tmp_path: Path) -> None:
    ended = [run.wait() for run in start_both(gpulaunch, tmp_path, (KEEPS, KEEPS), dirs=("shared", "shared"))]

    assert [each.code for each in ended] == [0, 0], "\n".join(f"{each}" for each in ended)
    assert all(each.stdout.count("RESUMED 4\n") == 2 for each in ended)
    assert ended[0].stderr.count(f"all nodes share {tmp_path / 'shared'}: --replicate changes nothing") == 2
