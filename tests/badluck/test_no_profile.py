"""`--no-profile`: in a rank and in its dataloader workers torch is as plain Python has it, and nobody watches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bad_node import WAIT_S

pytestmark = pytest.mark.torch

PROGRAM = str(Path(__file__).with_name("told_by_rank.py"))
PROCESSES = ("rank", "fork", "spawn")
DOOR = {"", ".probe", ".probe.inject", ".probe.tempdir", ".probe.teardown"}
"""What of the profiler every process of a run imports: torch calls `inject.arm` at the end of its own import, and as a
run has a control page, profiled or not, the sockets of multiprocessing are put beside it."""
ORDERED = "torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper"
"""What a rank has of ours even so: the order in which DDP lets go of its parts (probe/teardown.py)."""
PRELOADED = (".probe.", ".channel", ".files")
"""What the fork server imports once for all ranks, profiled or not; to import it does nothing (tests/house)."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a program and its dataloader worker have said of themselves, and who ran beside them."""

    processes: dict[str, dict[str, Any]]
    """By name: the rank, its forked worker, its spawned worker."""
    beside: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """In the directory of the run's shared files."""


def told(directory: Path, name: str) -> dict[str, Any]:
    path = directory / f"{name}.json"
    until_s = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < until_s, f"nothing from the {name}"
        time.sleep(0.02)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def under_gpulaunch(gpulaunch: Any, tmp_path: Path, *options: str) -> Told:
    directory = tmp_path / "-".join(("told", *options))
    directory.mkdir()
    pages = tmp_path / "shared"
    pages.mkdir(exist_ok=True)
    told_where = {"TELL": str(directory), "GPULAUNCH_SHM_DIR": str(pages)}
    run = gpulaunch.start(*options, "--nproc", "1", "--job-dir", directory / "job", PROGRAM, env=told_where)
    run.wait_for("READY", 4 * WAIT_S)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    beside = tuple(sorted(Path(f"/proc/{pid}/comm").read_text().strip() for pid in children))
    files = tuple(sorted(path.name for path in pages.glob("gpulaunch-*/*")))
    ended = run.wait(4 * WAIT_S)
    assert ended.code == 0, ended
    return Told(processes={name: told(directory, name) for name in PROCESSES}, beside=beside, files=files)


def under_python(tmp_path: Path) -> Told:
    directory = tmp_path / "told-plain"
    directory.mkdir()
    # In a place where gpulaunch is not: its entry point is what makes a difference.
    environ = {**os.environ, "TELL": str(directory), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, PROGRAM], env=environ, stdin=subprocess.DEVNULL, timeout=4 * WAIT_S, check=True)
    return Told(processes={name: told(directory, name) for name in PROCESSES})


def changed(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Functions of torch's that are not the same in both; each has imported some that the other has not."""
    mine, theirs = one["functions"], other["functions"]
    assert len(mine.keys() & theirs.keys()) > 10_000, "hardly anything was compared"
    return sorted(place for place in mine.keys() & theirs.keys() if mine[place] != theirs[place])


def test_without_the_profiler_nothing_is_touched_and_nobody_watches(gpulaunch: Any, tmp_path: Path) -> None:
    plain = under_python(tmp_path)
    off = under_gpulaunch(gpulaunch, tmp_path, "--no-profile")
    on = under_gpulaunch(gpulaunch, tmp_path)

    for name, as_ever in plain.processes.items():
        seen = off.processes[name]
        ours = [] if name == "spawn" else [ORDERED]
        assert changed(as_ever, seen) == ours
        preload_finder = len(
            ours
        )  # a finder for what was imported before the fork; see launcher/loop/preload_finder.py
        hooks = as_ever["hooks"] | {"import": as_ever["hooks"]["import"] + preload_finder}
        assert (seen["ours"], seen["hooks"]) == (ours, hooks)
        assert seen["threads"] == as_ever["threads"]
        assert seen["maps"] == []
        assert seen["alive"] == ["release_process_group_last.<locals>.build_and_order"] * len(ours)
        modules = {name.removeprefix("gpulaunch.profiler") for name in seen["modules"] if ".profiler" in name}
        assert {name for name in modules - DOOR if not name.startswith(PRELOADED)} == set()
    assert modules <= DOOR, "the spawned one has not even the code"
    assert "gpulaunch-side" not in off.beside
    assert [
        name for name in off.files if name.startswith(("rank-", "workers-", "facts-", "group", "run", "sidecar"))
    ] == []

    # What all this would have shown:
    assert {"torch.utils.data.dataloader._BaseDataLoaderIter.__next__", "torch.save"} <= set(
        on.processes["rank"]["ours"]
    )
    in_c = {"torch.distributed.distributed_c10d.Work.wait"}
    assert set(on.processes["rank"]["ours"]) - in_c <= set(changed(plain.processes["rank"], on.processes["rank"]))
    for name in PROCESSES[1:]:
        fetch = "torch.utils.data._utils.fetch._MapDatasetFetcher.fetch"
        assert fetch in changed(plain.processes[name], on.processes[name])
    assert {"tap_next.<locals>.tapped_next"} <= set(on.processes["rank"]["alive"])
    assert on.processes["rank"]["hooks"] != plain.processes["rank"]["hooks"]
    assert [path for path in on.processes["rank"]["maps"] if path.endswith("rank-0.bin")]
    assert "gpulaunch-side" in on.beside
    assert {"rank-0.bin", "workers-0.bin", "group.json", "sidecar.json"} <= set(on.files)
