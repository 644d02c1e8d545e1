"""What PyTorch's own tests of torchrun ask of it, asked of `gpulaunch.compat.torchrun.main`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.compat import torchrun
from gpulaunch.launcher.job.host_info import detect
from ports import free_port

SCRIPT = """
import argparse, os, sys

parser = argparse.ArgumentParser()
parser.add_argument("--touch-file-dir", required=True)
parser.add_argument("--fail", action="store_true")
args = parser.parse_args()
wanted = '''RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR
    MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID OMP_NUM_THREADS SENTINEL'''
missing = [name for name in wanted.split() if name not in os.environ]
if missing or args.fail:
    raise RuntimeError(f"missing {missing}" if missing else "raising because --fail was given")
with open(os.path.join(args.touch_file_dir, os.environ["RANK"]), "w") as file:
    file.write(os.environ["TORCHELASTIC_RUN_ID"])
"""
SHELL_SCRIPT = '#!/bin/sh\necho "creating $1/$RANK"\necho "complaining $RANK" >&2\ntouch "$1/$RANK"\n'


class Scenario:
    """A Python script and a shell script that touch a file named after their rank."""

    def __init__(self, here: Path) -> None:
        self.script, self.shell_script, self.touched_dir = here / "script.py", here / "script.sh", here / "touched"
        self.script.write_text(SCRIPT)
        self.shell_script.write_text(SHELL_SCRIPT)
        self.shell_script.chmod(0o755)
        self.touched_dir.mkdir()

    @property
    def python(self) -> list[str]:
        return [str(self.script), f"--touch-file-dir={self.touched_dir}"]

    @property
    def shell(self) -> list[str]:
        return [str(self.shell_script), str(self.touched_dir)]

    def ranks(self) -> list[int]:
        return sorted(int(name) for name in os.listdir(self.touched_dir))

    def run_ids(self) -> set[str]:
        return {path.read_text() for path in self.touched_dir.iterdir()}


@pytest.fixture
def scenario(here: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    monkeypatch.setenv("SENTINEL", "set in the launcher, seen in the rank")
    return Scenario(here)


# --- a script is run on every rank --------------------------------------------------------------------------------


def test_a_python_script(scenario: Scenario) -> None:
    """Without a port the run id is a fresh one, as in torch, whatever --rdzv-id says."""
    torchrun.main(["--nnodes=1", "--nproc-per-node=4", "--rdzv-id=42", "--monitor-interval=1", *scenario.python])

    assert scenario.ranks() == [0, 1, 2, 3]
    assert len(scenario.run_ids()) == 1
    assert scenario.run_ids() != {"42"}


def test_a_python_script_at_a_port_of_its_own(scenario: Scenario) -> None:
    port = ["--master-addr=localhost", f"--master-port={free_port()}"]
    torchrun.main(["--nnodes=1", "--nproc-per-node=4", "--node-rank=0", "--rdzv-id=42", *port, *scenario.python])

    assert scenario.ranks() == [0, 1, 2, 3]
    assert scenario.run_ids() == {"42"}


@pytest.mark.parametrize(
    "how",
    [["--standalone"], ["--run-path"], ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]],
    ids=["standalone", "run-path", "c10d"],
)
def test_a_python_script_in_other_ways(scenario: Scenario, how: list[str]) -> None:
    torchrun.main([*how, "--nnodes=1", "--nproc-per-node=4", *scenario.python])

    assert scenario.ranks() == [0, 1, 2, 3]


def test_a_shell_script(scenario: Scenario) -> None:
    args = ["--nnodes=1", "--nproc-per-node=4", "--no-python"]

    with pytest.raises(ValueError, match="--no-python and --module"):
        torchrun.main([*args, "--module", *scenario.shell])
    torchrun.main([*args, *scenario.shell])

    assert scenario.ranks() == [0, 1, 2, 3]


def test_a_module(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(scenario.script.parent))
    torchrun.main(["--nproc-per-node=2", "-m", "script", *scenario.python[1:]])

    assert scenario.ranks() == [0, 1]


def test_everything_by_environment_variables(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    monkeypatch.setenv("PET_RDZV_ID", "42")
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "1")
    monkeypatch.setenv("PET_NO_PYTHON", "1")

    monkeypatch.setenv("PET_MODULE", "1")
    with pytest.raises(ValueError, match="--no-python and --module"):
        torchrun.main(scenario.shell)
    monkeypatch.setenv("PET_MODULE", "0")
    torchrun.main(scenario.shell)

    assert scenario.ranks() == [0, 1, 2, 3]


def test_a_namespace_may_be_changed_before_it_is_run(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller wrote into it wins over the environment that it came from."""
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_NO_PYTHON", "1")
    args = torchrun.parse_args(scenario.python)
    args.nproc_per_node, args.no_python, args.something_else = "2", False, object()
    torchrun.run(args)

    assert scenario.ranks() == [0, 1]


# --- how many ranks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc", ["default", "3", "auto", "cpu"])
def test_the_number_of_ranks(scenario: Scenario, nproc: str) -> None:
    host = detect(os.environ)
    expected = {"default": 1, "3": 3, "auto": len(host.gpus) or host.cores, "cpu": host.cores}[nproc]
    torchrun.main([*([] if nproc == "default" else [f"--nproc-per-node={nproc}"]), "--no-python", *scenario.shell])

    assert scenario.ranks() == list(range(expected))


def test_an_unknown_number_of_ranks(scenario: Scenario) -> None:
    with pytest.raises(ValueError, match="expected a number, auto, gpu, cpu or xpu, got 'unknown'"):
        torchrun.main(["--nproc-per-node=unknown", "--no-python", *scenario.shell])


@pytest.mark.skipif(bool(detect(os.environ).gpus), reason="there are GPUs here")
def test_gpus_where_there_are_none(scenario: Scenario) -> None:
    with pytest.raises(ValueError, match="there is no GPU here"):
        torchrun.main(["--nproc-per-node=gpu", "--no-python", *scenario.shell])


def test_the_range_of_nodes_is_read_as_torch_reads_it() -> None:
    assert torchrun.parse_min_max_nnodes("1") == (1, 1)
    assert torchrun.parse_min_max_nnodes("2:20") == (2, 20)
    with pytest.raises(RuntimeError, match='"MIN:MAX"'):
        torchrun.parse_min_max_nnodes("2:20:30")


def test_nodes_that_may_be_fewer_run_after_the_last_call(scenario: Scenario) -> None:
    """As torch's own test of `--nnodes 1:2` does, with a shorter wait."""
    torchrun.main(
        [
            *("--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"),
            *("--rdzv-conf=last_call_timeout=1", *scenario.python),
        ]
    )

    assert scenario.ranks() == [0, 1]


# --- failures -----------------------------------------------------------------------------------------------------


def test_a_script_that_fails(scenario: Scenario, start_caller: Any) -> None:
    """main raises ChildFailedError, which ends a launcher with 1; one above it finds the cause in its error file."""
    caller = start_caller(f"""
        import os
        from gpulaunch.compat import torchrun
        os.environ["TORCHELASTIC_ERROR_FILE"] = "for-the-launcher-above.json"
        torchrun.main(["--nproc-per-node=2", "--max-restarts=0", *{[*scenario.python, "--fail"]}])
    """)
    code, _, stderr = caller.wait()
    told = json.loads(Path("for-the-launcher-above.json").read_text())

    assert code == 1
    assert "torch.distributed.elastic.multiprocessing.errors.ChildFailedError" in stderr
    assert f"{scenario.script} FAILED" in stderr
    assert told["message"]["message"] == "RuntimeError: raising because --fail was given"
    assert told["message"]["errorCode"] == 1


def test_an_error_of_the_launcher_itself_is_recorded_too(scenario: Scenario, start_caller: Any) -> None:
    caller = start_caller(f"""
        import os
        from gpulaunch.compat import torchrun
        os.environ["TORCHELASTIC_ERROR_FILE"] = "for-the-launcher-above.json"
        torchrun.main(["--nproc-per-node=0", *{scenario.python}])
    """)
    code, _, _ = caller.wait()

    assert code == 1
    assert "at least 1 rank" in Path("for-the-launcher-above.json").read_text()


# --- torch knows it was launched ----------------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_takes_us_for_torchelastic_and_finds_its_peers(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """is_torchelastic_launched(), and init_process_group by env:// and by a tcp:// address of the launcher's port."""
    monkeypatch.delenv("PET_START_METHOD")
    script = here / "join.py"
    script.write_text("""
import sys
import torch, torch.distributed as dist
method = sys.argv[1]
options = {} if method == "env://" else {"rank": int(__import__("os").environ["RANK"]), "world_size": 2}
dist.init_process_group("gloo", init_method=method, **options)
total = torch.ones(1)
dist.all_reduce(total)
print(method.partition(":")[0], dist.is_torchelastic_launched(), total.item())
""")
    port = free_port()
    args = [
        "--run-path",
        "--nproc-per-node=2",
        "--master-addr=localhost",
        f"--master-port={port}",
        "--logs-specs=default",
    ]
    # Two jobs: a second process group of the same name in one store meets the addresses of the first.
    for method in ("env://", f"tcp://localhost:{port}"):
        torchrun.main([*args, str(script), method])

        lines = sorted(capfd.readouterr().out.splitlines())
        assert lines == [f"[{rank}] {method.partition(':')[0]} True 2.0" for rank in (0, 1)]


# --- logs ---------------------------------------------------------------------------------------------------------


def test_lines_are_captured_and_shown_with_the_prefix_of_the_template(
    scenario: Scenario, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank${rank}]: ")
    args = ["--nproc-per-node=4", "--redirect=3", "--tee=3", "--log-dir=logs", "--no-python"]
    torchrun.main([*args, *scenario.shell])
    shown = capfd.readouterr()
    (run,) = (here / "logs").iterdir()

    for rank in range(4):
        assert f"[rank{rank}]: creating {scenario.touched_dir}/{rank}\n" in shown.out
        assert f"[rank{rank}]: complaining {rank}\n" in shown.err
        directory = run / "attempt_0" / str(rank)
        assert (directory / "stdout.log").read_text() == f"creating {scenario.touched_dir}/{rank}\n"
        assert (directory / "stderr.log").read_text() == f"complaining {rank}\n"
    assert sorted(path.name for path in (run / "attempt_0").iterdir()) == ["0", "1", "2", "3"]


def test_redirected_lines_are_not_shown_and_filters_choose_ranks(
    scenario: Scenario, capfd: pytest.CaptureFixture[str]
) -> None:
    args = ["--nproc-per-node=3", "-r", "0:1", "--local-ranks-filter=0,1", "--log-dir=logs", "--no-python"]
    torchrun.main([*args, *scenario.shell])
    shown = capfd.readouterr()

    assert shown.out == f"[1] creating {scenario.touched_dir}/1\n"
    assert sorted(line for line in shown.err.splitlines() if "complaining" in line) == [
        "[0] complaining 0",
        "[1] complaining 1",
    ]


def test_logs_specs_that_nobody_installed(scenario: Scenario) -> None:
    with pytest.raises(
        ValueError, match=r"no installed package has an entry point torchrun\.logs_specs\[DOESNOT_EXIST\]"
    ):
        torchrun.main(["--logs_specs=DOESNOT_EXIST", *scenario.python])


def test_the_number_of_the_local_rank_as_an_argument(scenario: Scenario, capfd: pytest.CaptureFixture[str]) -> None:
    """By torchrun's macro, and by the option of the old torch.distributed.launch."""
    torchrun.main(["--nproc-per-node=2", "--no-python", "echo", "--gpu=${local_rank}"])
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] --gpu=0", "[1] --gpu=1"]

    args = torchrun.parse_args(["--nproc-per-node=2", "--no-python", "echo", "--x"])
    args.use_env = False
    torchrun.run(args)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] --local-rank=0 --x", "[1] --local-rank=1 --x"]
