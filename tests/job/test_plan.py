"""What each rank gets: environment, command line, what of it is shown; and the text of --dry-run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulaunch.launcher.job.describe import describe
from gpulaunch.launcher.job.host_info import HostInfo
from gpulaunch.launcher.job.plan import line_prefix, prefix_is_unused, rank_args, rank_argv, rank_environment, shown
from gpulaunch.launcher.job.spec import JobSpec, Request, Std

Load = Callable[..., Request]
MakeHost = Callable[..., HostInfo]


def environment(spec: JobSpec, local_rank: int = 0, attempt: int = 0) -> dict[str, str]:
    return rank_environment(
        spec,
        local_rank=local_rank,
        attempt=attempt,
        master_port=spec.master_port or 4242,
        error_file="/run/error.json",
        use_agent_store=True,
    )


def test_a_rank_of_two_nodes(job: Load) -> None:
    spec = job(
        *("--nnodes", "2", "--node-rank", "1", "--nproc", "2", "--master-addr", "10.0.0.1", "--master-port", "7"),
        *("--role", "trainer", "--max-restarts", "3", "--rdzv-id", "run7", "--signals-to-handle", "SIGTERM,SIGUSR1"),
    ).spec

    assert environment(spec, local_rank=1, attempt=2) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "7",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/run/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "4",
    }


DUMP = """
import json, os, sys
with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump([dict(os.environ), sys.argv[1:]], file)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node", "2", "--role", "trainer", "--max-restarts", "1"],
        ["--master-port", "0", "--rdzv-id", "run7", "--nproc-per-node", "2", "--virtual-local-rank"],
    ],
    ids=["free port", "static"],
)
def test_the_environment_is_torchruns_name_by_name(
    job: Load, make_host: MakeHost, tmp_path: Path, words: list[str]
) -> None:
    """Every rank under torchrun against our plan for the same words; only paths, ports and random ids may differ."""
    from contextlib import closing
    from socket import create_server

    with closing(create_server(("127.0.0.1", 0))) as probe:  # torchrun cannot bind a port for us
        words = [str(probe.getsockname()[1]) if word == "0" else word for word in words]
    Path("dump.py").write_text(DUMP)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "OMP_", "GPULAUNCH_"))}
    argv = [*words, "dump.py", "--rank=${local_rank}", "$$x"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--log-dir", str(tmp_path / "logs"), *argv]
    subprocess.run(torchrun, env=clean, capture_output=True, check=True, timeout=120)
    theirs = [json.loads(Path(f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    spec = job(*argv, environ=clean, on=make_host(cores=2), program=False).spec

    free = {"TORCHELASTIC_ERROR_FILE"}
    if spec.master_port is None:
        free |= {"MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    # torchrun names the machine by its FQDN; a fresh single node of ours is always reached over loopback.
    free |= {"MASTER_ADDR"} if spec.master_addr == "localhost" else set()
    for their_environ, their_args in theirs:
        local_rank = int(their_environ["RANK"])
        mine = environment(spec, local_rank)
        set_by_torchrun = {name: value for name, value in their_environ.items() if clean.get(name) != value}

        assert set(mine) == set(set_by_torchrun)
        assert {n: v for n, v in mine.items() if n not in free} == {
            n: v for n, v in set_by_torchrun.items() if n not in free
        }
        assert rank_args(spec, local_rank) == their_args


def test_the_job_files_environment_is_below_the_launchers(job: Load) -> None:
    Path("job.toml").write_text(
        "nproc = 2\n[env]\nA = 'b'\nOMP_NUM_THREADS = '3'\nTORCH_NCCL_ASYNC_ERROR_HANDLING = '0'\n"
    )
    env = environment(job("--config", "job.toml").spec)

    assert (env["A"], env["OMP_NUM_THREADS"], env["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("b", "3", "0")


@pytest.mark.parametrize(
    ("words", "inherited", "visible"),
    [
        ([], None, [None, None]),
        ([], "4,5", [None, None]),  # inherited as it is
        (["--gpus", "2,0"], None, ["2,0", "2,0"]),
        (["--gpus", "1,0"], "4,5", ["5,4", "5,4"]),
        (["--virtual-local-rank"], None, ["0", "1"]),
        (["--virtual-local-rank"], "4, 5", ["4", "5"]),
        (["--virtual-local-rank", "--gpus", "1,0"], "4,5", ["5", "4"]),
    ],
)
def test_visible_devices(
    job: Load, make_host: MakeHost, words: list[str], inherited: str | None, visible: list[str | None]
) -> None:
    environ = {} if inherited is None else {"CUDA_VISIBLE_DEVICES": inherited}
    spec = job("--nproc", "2", *words, environ=environ, on=make_host(gpus=3 if inherited is None else 2)).spec
    envs = [environment(spec, rank) for rank in (0, 1)]

    assert [env.get("CUDA_VISIBLE_DEVICES") for env in envs] == visible
    assert [env["LOCAL_RANK"] for env in envs] == (["0", "0"] if "--virtual-local-rank" in words else ["0", "1"])


def test_a_memory_fraction_is_told_to_the_ranks_only_if_given(job: Load) -> None:
    assert environment(job("--gpu-memory-fraction", "0.5").spec)["GPULAUNCH_GPU_MEMORY_FRACTION"] == "0.5"
    assert "GPULAUNCH_GPU_MEMORY_FRACTION" not in environment(job().spec)


def test_a_budget_of_the_profiler_is_told_to_the_ranks_only_if_given(job: Load) -> None:
    assert environment(job("--profile-budget", "1.50").spec)["GPULAUNCH_PROFILE_BUDGET"] == "1.5"
    assert environment(job("--profile-budget", "0.5").spec)["GPULAUNCH_PROFILE_BUDGET"] == "0.5"
    assert "GPULAUNCH_PROFILE_BUDGET" not in environment(job("--profile-budget", "2", "--no-profile").spec)
    assert "GPULAUNCH_PROFILE_BUDGET" not in environment(job().spec)


def test_logs_to_nowhere_have_no_error_file(job: Load) -> None:
    assert environment(job("--log-dir", "/dev/null").spec)["TORCHELASTIC_ERROR_FILE"] == ""


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["t.py", "--out", "log${local_rank}"], ["PY", "-u", "t.py", "--out", "log1"]),
        (["-m", "pkg", "$local_rank", "$HOME", "$$"], ["PY", "-u", "-m", "pkg", "1", "$HOME", "$"]),
        (["--run-path", "t.py"], ["PY", "-u", "t.py"]),
        (["--no-python", "/bin/echo", "${local_rank}"], ["/bin/echo", "1"]),
    ],
)
def test_the_command_line_of_a_rank(job: Load, words: list[str], argv: list[str]) -> None:
    Path("t.py").write_text("")
    spec = job(*words, environ={"PYTHON_EXEC": "PY"}, program=False).spec

    assert rank_argv(spec, 1) == argv


@pytest.mark.parametrize(
    ("words", "visible"),
    [
        ([], "oe oe"),
        (["-r", "1"], "-e -e"),
        (["-r", "3", "-t", "0:1"], "o- --"),
        (["-r", "3", "-t", "3"], "oe oe"),
        (["--local-ranks-filter", "1"], "-- oe"),
        (["--console", "0"], "oe --"),
        (["--console", "none"], "-- --"),
    ],
)
def test_what_is_shown(job: Load, words: list[str], visible: str) -> None:
    spec = job("--nproc", "2", *words).spec
    letters = [
        "".join(letter if shown(spec, rank, stream) else "-" for stream, letter in ((Std.OUT, "o"), (Std.ERR, "e")))
        for rank in (0, 1)
    ]

    assert " ".join(letters) == visible


def test_teed_lines_have_torchruns_prefix(job: Load) -> None:
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}/${rank}/${local_rank}>"}
    spec = job("-t", "1").spec

    assert line_prefix(spec, 0, 8, Std.OUT) == b"[default0]:"
    assert line_prefix(spec, 0, 8, Std.ERR) == b""
    assert line_prefix(job("-t", "3", environ=template).spec, 0, 8, Std.ERR) == b"<default/8/0>"

    own = ("-t", "1", "--log-line-prefix-template", "${hostname}:${rank}: ")
    assert line_prefix(job(*own, environ=template).spec, 0, 8, Std.OUT) == f"{socket.gethostname()}:8: ".encode()
    empty = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": ""}
    assert line_prefix(job("-t", "1", environ=empty).spec, 0, 8, Std.OUT) == b"[default0]:"


def test_a_prefix_without_a_teed_stream_is_of_no_use(job: Load) -> None:
    given = ("--log-line-prefix-template", "${rank}: ")

    assert prefix_is_unused(job(*given).spec)
    assert not prefix_is_unused(job(*given, "--nproc", "2", "--tee", "1:1").spec)
    assert not prefix_is_unused(job("-t", "0").spec)
    assert not prefix_is_unused(job(environ={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${rank}: "}).spec)


# -- --dry-run


def test_the_plan_as_text(job: Load, make_host: MakeHost) -> None:
    Path("train.py").write_text("import torch\nimport numpy, pytest\n")
    Path("job.toml").write_text('name = "digits"\n[env]\nWANDB_API_KEY = "abc"\nPLAIN = "text"\n')
    words = ["--config", "job.toml", "--nproc", "2", "--master-port", "5", "--metrics-addr", "[::1]:9"]
    argv = [*words, "train.py", "--hf-token", "s3cret", "--api_key=s3cret", "--out", "${local_rank}"]
    machine = make_host(gpus=1)
    spec = job(*argv, environ={"PET_ROLE": "trainer", "PYTHON_EXEC": "python"}, on=machine, program=False).spec
    text = describe(spec, machine, refused={"pytest": "it opens a socket"})
    lines = [" ".join(line.split()) for line in text.splitlines()]

    refused = "; not pytest: it opens a socket"
    for expected in (
        "launched by one host",
        "cores 8 (all 8)",
        "GPU 0 NVIDIA H200, 139.0 GiB, GPU-00000000-aaaa",
        "job digits, run id none",
        "ranks 2 on this node (node 0 of 1), 2 in all",
        "store 127.0.0.1, port 5",
        "preload torch, numpy (imports of the script; each must pass the checks for forking)" + refused,
        "metrics http://[::1]:9/metrics",
        "run directory ./gpulaunch-runs/digits-<time>",
        "name digits job.toml",
        "role trainer environment PET_ROLE",
        "nproc-per-node 2 command line",
        "nnodes 1:1 default",
        "OMP_NUM_THREADS 4 detected: 8 cores (all 8) for 2 ranks",
        "WORLD_SIZE=2",
        "WANDB_API_KEY=<redacted>",
        "PLAIN=text",
        "python -u train.py --hf-token '<redacted>' '--api_key=<redacted>' --out 1",
        "TORCHELASTIC_ERROR_FILE=<run directory>/attempts/0/rank-1/error.json",
    ):
        assert expected in lines
    assert "abc" not in text
    assert "s3cret" not in text


@pytest.mark.parametrize(
    ("words", "row"),
    [
        ([], "store localhost, port <a free port>"),
        (["--no-profile"], "metrics off (--no-profile)"),
        ([], "metrics http://127.0.0.1:9464/metrics, or the next free port"),
        (["--start-method", "spawn"], "preload nothing (ranks are spawned)"),
        (["--preload", "numpy"], "preload torch, numpy (named; each must pass the checks for forking)"),
        (["--preload", "none"], "preload nothing (the script imports the standard library only)"),
        (["--job-dir", "out"], "run directory out"),
        (
            ["--max-restarts", "2", "--shutdown-timeout", "5"],
            "restarts at most 2; 5 s for ranks to end before SIGKILL, 1 s after a failure",
        ),
        (
            ["--max-restarts", "9", "--restart-rate", "5/1h"],
            "restarts at most 9, 5 within 3600 s; 30 s for ranks to end before SIGKILL, 1 s after a failure",
        ),
        (
            ["--job-dir", "out"],
            "checkpoints in out/checkpoints; resumes from the newest complete one, passed as GPULAUNCH_RESUME_FROM",
        ),
        (
            ["--checkpoint-dir", "a,b", "--resume", "never"],
            "checkpoints in a, b; none is used (--resume never)",
        ),
        (["--hang-timeout", "0"], "hangs no detection (--hang-timeout 0)"),
        (
            ["--no-profile"],
            "hangs restart, only for ranks stopped by a signal (--no-profile)",
        ),
        (["--on-hang", "stop"], "hangs stop; at once if proven, else after 600 s, 3600 s for the first step"),
    ],
)
def test_rows_of_the_plan(job: Load, make_host: MakeHost, words: list[str], row: str) -> None:
    assert row in [" ".join(line.split()) for line in describe(job(*words).spec, make_host()).splitlines()]


def test_the_plan_has_a_row_for_every_option(job: Load, make_host: MakeHost) -> None:
    from gpulaunch.launcher.job.option_table import OPTIONS

    spec = job().spec
    text = describe(spec, make_host())

    assert [option.name for option in OPTIONS if f"\n  {option.name} " not in text] == []
    assert set(spec.options) == set(spec.origins)
