"""Every rank's environment under torchrun and under gpulaunch, variable by variable."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from ports import free_port

pytestmark = pytest.mark.torch

DUMP = """\
import json, os
with open(os.path.join(os.environ["DUMP_TO"], os.environ["GROUP_RANK"] + "-" + os.environ["RANK"]), "w") as out:
    json.dump(dict(os.environ), out)
"""
# What is ours, or the shell's trace of which command ran; OMP_NUM_THREADS differs on purpose and has its own test.
NOT_COMPARED = re.compile(r"GPULAUNCH_|_$|OMP_NUM_THREADS$")


def comparable(environment: dict[str, str], *, fixed_port: bool) -> dict[str, str]:
    """The environment with what differs from run to run replaced by its shape."""
    seen = {name: value for name, value in environment.items() if not NOT_COMPARED.match(name)}
    del seen["DUMP_TO"]
    if not fixed_port:
        assert 1024 <= int(seen["MASTER_PORT"]) < 65536
        seen["MASTER_PORT"] = "<a free port>"
    try:
        uuid.UUID(seen["TORCHELASTIC_RUN_ID"])
        seen["TORCHELASTIC_RUN_ID"] = "<uuid>"
    except ValueError:
        pass  # a name the user gave
    assert os.path.isabs(seen["TORCHELASTIC_ERROR_FILE"])
    seen["TORCHELASTIC_ERROR_FILE"] = os.path.basename(seen["TORCHELASTIC_ERROR_FILE"])
    return seen


def dump(command: list[list[str]], work: Path, *, fixed_port: bool) -> dict[str, dict[str, str]]:
    """Run one command per node at the same time; the comparable environments by "<node>-<rank>"."""
    work.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"DUMP_TO": str(work), "MY_OWN": "kept"}
    nodes = [
        subprocess.Popen(one, cwd=work, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for one in command
    ]
    for node in nodes:
        said, _ = node.communicate(timeout=120)
        assert node.returncode == 0, said
    return {
        file.name: comparable(json.loads(file.read_text()), fixed_port=fixed_port)
        for file in work.iterdir()
        if re.fullmatch(r"\d+-\d+", file.name)
    }


@pytest.mark.parametrize(
    "options",
    [
        ["--nproc-per-node", "2"],
        ["--standalone", "--nproc_per_node=1", "--max-restarts=2", "--role", "trainer"],
        ["--nproc-per-node", "2", "--master-port", "{port}", "--rdzv-id", "my-job"],
        ["--nproc-per-node", "2", "--virtual-local-rank"],
        ["--nproc-per-node", "1", "--nnodes", "1:1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
         "--rdzv-id", "j1", "--signals-to-handle", "SIGTERM,SIGUSR1"],
    ],
    ids=lambda options: " ".join(options),
)  # fmt: skip
def test_single_node(tmp_path: Path, options: list[str]) -> None:
    program = tmp_path / "dump.py"
    program.write_text(DUMP)
    fixed = "{port}" in options
    options = [str(free_port()) if option == "{port}" else option for option in options]
    scripts = Path(sys.executable).parent

    theirs = dump([[str(scripts / "torchrun"), *options, str(program)]], tmp_path / "torchrun", fixed_port=fixed)
    for method in ("fork", "spawn"):
        command = [str(scripts / "gpulaunch"), "--start-method", method, *options, str(program)]
        ours = dump([command], tmp_path / method, fixed_port=fixed)

        assert theirs.keys() == ours.keys()
        assert different(theirs, ours) == []


def different(theirs: dict[str, dict[str, str]], ours: dict[str, dict[str, str]]) -> list[str]:
    """Only what differs: a whole environment has no place in a test's output."""
    return [
        f"{name} of {rank}: torchrun {theirs[rank].get(name)!r}, gpulaunch {ours[rank].get(name)!r}"
        for rank in sorted(theirs)
        for name in sorted(theirs[rank].keys() | ours[rank].keys())
        if theirs[rank].get(name) != ours[rank].get(name)
    ]


def test_two_static_nodes(tmp_path: Path) -> None:
    program = tmp_path / "dump.py"
    program.write_text(DUMP)
    scripts = Path(sys.executable).parent
    seen = []
    port = str(free_port())
    for launcher in ("torchrun", "gpulaunch"):
        common = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
        commands = [[str(scripts / launcher), *common, "--node-rank", str(node), str(program)] for node in range(2)]
        seen.append(dump(commands, tmp_path / launcher, fixed_port=True))

    assert sorted(seen[0]) == ["0-0", "0-1", "1-2", "1-3"] == sorted(seen[1])
    assert different(*seen) == []


def test_omp_num_threads_shares_the_cores_and_leaves_the_users_value_alone(gpulaunch, tmp_path: Path) -> None:
    program = tmp_path / "omp.py"
    program.write_text("import os; print('OMP', os.environ['OMP_NUM_THREADS'])")
    cores = len(os.sched_getaffinity(0))

    ours = gpulaunch("--nproc", "2", "--start-method", "spawn", program)
    users = gpulaunch("--nproc", "2", "--start-method", "spawn", program, env={"OMP_NUM_THREADS": "7"})

    assert ours.stdout.count("OMP") == 2
    # A cgroup quota may leave fewer cores than the affinity mask, never more.
    assert {1 <= int(line.split()[-1]) <= max(1, cores // 2) for line in ours.stdout.splitlines()} == {True}
    assert users.stdout.count("OMP 7") == 2
    assert "*****" not in ours.stderr, "no banner"
