"""What the fork server imports before it forks: only what every rank can share, each refusal with its reason."""

from __future__ import annotations

import json
import os
import textwrap
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

# Each package counts its imports and shows one habit.
HABITS = {
    "harmless": "",
    "torchy": "import torch; torch.set_num_threads(torch.get_num_threads())",
    "thready": "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "sockety": "import socket; kept = socket.socket()",
    "ranky_get": "import os; rank = os.environ.get('RANK')",
    "ranky_getenv": "import os; rank = os.getenv('LOCAL_RANK', '0')",
    "ranky_in": "import os; distributed = 'SLURM_PROCID' in os.environ",
    "environy": "import os; home = os.environ.get('HOME'); copy = dict(os.environ)['PATH']",
    "broken": "raise ImportError('not today')",
    "leaving": "import os; os._exit(5)",
    "exiting": "import sys; sys.exit(3)",
}
REASONS = {
    "torchy": "torch.set_num_threads",
    "thready": "thread",
    "sockety": "socket",
    "ranky_get": "RANK",
    "ranky_getenv": "LOCAL_RANK",
    "ranky_in": "SLURM_PROCID",
    "broken": "ImportError",
    "leaving": "ended the process",
    "exiting": "SystemExit",
}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A directory for PYTHONPATH with the packages of HABITS."""
    site = tmp_path / "site"
    for name, habit in HABITS.items():
        package = site / name
        package.mkdir(parents=True)
        count = f"open({str(tmp_path / name) + '.count'!r}, 'a').write('x')"
        (package / "__init__.py").write_text(f"{count}\n{habit}\n")
    return site


def imports(tmp_path: Path, name: str) -> int:
    count = tmp_path / f"{name}.count"
    return len(count.read_text()) if count.exists() else 0


def run(gpulaunch, tmp_path: Path, packages: Path, names: list[str], program: str, *options: str, **env: str):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(program))
    env |= {"PYTHONPATH": os.fspath(packages), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    job = tmp_path / f"job-{len(list(tmp_path.glob('job-*')))}"
    ended = gpulaunch("--nproc", "2", "--preload", ",".join(names), "--job-dir", job, *options, script, env=env)
    (ready,) = [
        event
        for event in map(json.loads, (job / "events.jsonl").read_text().splitlines())
        if event["event"] == "fork_server_ready"
    ]
    return ended, ready


def test_each_unsafe_package_is_left_to_the_ranks_and_the_others_are_shared(
    gpulaunch, tmp_path: Path, packages: Path
) -> None:
    ended, ready = run(gpulaunch, tmp_path, packages, list(HABITS), "import harmless, environy")

    assert ended.code == 0, ended
    assert ready["loaded"] == ["harmless", "environy"]
    assert ready["refused"].keys() == REASONS.keys()
    for name, reason in REASONS.items():
        assert reason in ready["refused"][name]


def test_a_package_that_reads_the_rank_is_imported_by_each_rank_itself(
    gpulaunch, tmp_path: Path, packages: Path
) -> None:
    program = "import os, ranky_get; print('OF', os.environ['RANK'], 'IS', ranky_get.rank)"
    ended, _ = run(gpulaunch, tmp_path, packages, ["ranky_get"], program)

    assert sorted(line.split("OF ")[1] for line in ended.stdout.splitlines()) == ["0 IS 0", "1 IS 1"]


def test_a_shared_package_is_imported_once_and_a_refused_one_is_remembered(
    gpulaunch, tmp_path: Path, packages: Path
) -> None:
    program = "import harmless, thready"
    run(gpulaunch, tmp_path, packages, ["harmless", "thready"], program)
    assert imports(tmp_path, "thready") == 1 + 2, "one trial, and each of the two ranks"
    # The first trial ended with the refusal and took harmless along; the second kept it for all.
    assert imports(tmp_path, "harmless") == 2

    _, ready = run(gpulaunch, tmp_path, packages, ["harmless", "thready"], program)
    assert imports(tmp_path, "thready") == 3 + 2, "no trial: only the ranks"
    assert imports(tmp_path, "harmless") == 2 + 1
    assert "thready" in ready["refused"]


def test_what_imports_print_is_each_ranks_and_once(gpulaunch, tmp_path: Path, packages: Path) -> None:
    """With torchrun every rank says it; it is no line of the launcher's."""
    for name, habit in (("printy", ""), ("refused", HABITS["thready"])):
        (packages / name).mkdir()
        said = f"import os, sys; print('banner of {name}'); os.write(2, b'warning of {name}\\n')"
        (packages / name / "__init__.py").write_text(f"{said}\n{habit}\n")
    ended, ready = run(gpulaunch, tmp_path, packages, ["printy", "refused"], "import printy, refused")

    assert (ready["loaded"], list(ready["refused"])) == (["printy"], ["refused"])
    for name in ("printy", "refused"):
        assert sorted(line for line in ended.stdout.splitlines() if line.endswith(f"banner of {name}")) == [
            f"[{rank}] banner of {name}" for rank in range(2)
        ]
        assert sorted(line for line in ended.stderr.splitlines() if line.endswith(f"warning of {name}")) == [
            f"[{rank}] warning of {name}" for rank in range(2)
        ]


def test_a_warning_of_torchs_own_is_each_ranks(gpulaunch, tmp_path: Path, packages: Path) -> None:
    """Where CUDA is installed and no GPU is seen, a build for CUDA says it as this module is imported; the CPU's is
    asked for it. Two ranks: 4 s of CPU time."""
    (packages / "kernels").mkdir()
    (packages / "kernels/__init__.py").write_text(
        "import torch.utils.cpp_extension as built\nhome = built.CUDA_HOME or built._find_cuda_home()\n"
    )
    env = {"CUDA_HOME": "/opt/cuda-of-nobody", "CUDA_VISIBLE_DEVICES": ""}
    ended, ready = run(gpulaunch, tmp_path, packages, ["kernels"], "import kernels; print(kernels.home)", **env)

    assert (ended.code, ready["loaded"]) == (0, ["kernels"]), ended
    said = [line for line in ended.stderr.splitlines() if "No CUDA runtime is found" in line]
    assert sorted(line[:4] for line in said) == ["[0] ", "[1] "]
    assert all(line.endswith("using CUDA_HOME='/opt/cuda-of-nobody'") for line in said)


def test_the_plan_tells_what_will_not_be_preloaded(gpulaunch, tmp_path: Path, packages: Path) -> None:
    run(gpulaunch, tmp_path, packages, ["sockety"], "import sockety")

    env = {"PYTHONPATH": os.fspath(packages), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    plan = gpulaunch("--dry-run", "--preload", "sockety", tmp_path / "train.py", env=env)

    assert plan.code == 0
    assert "not sockety: it opened 1 socket(s)" in plan.stdout


def test_a_package_whose_threads_end_at_a_fork_is_safe(gpulaunch, tmp_path: Path, packages: Path) -> None:
    """As OpenBLAS does: it ends its threads before a fork and starts them again when they are needed."""
    (packages / "blas").mkdir()
    (packages / "blas/__init__.py").write_text(
        textwrap.dedent("""
            import os, threading
            stop = threading.Event()
            worker = threading.Thread(target=stop.wait)
            worker.start()
            def before():
                stop.set()
                worker.join()
            os.register_at_fork(before=before)
        """)
    )
    ended, ready = run(gpulaunch, tmp_path, packages, ["blas"], "import blas")

    assert ended.code == 0, ended
    assert ready["loaded"] == ["blas"]


@pytest.mark.root
def test_a_package_that_opens_the_gpu_driver_is_refused(gpulaunch, tmp_path: Path, packages: Path) -> None:
    node = Path("/dev/nvidia-of-a-gpulaunch-test")
    node.touch()
    (packages / "cuda_at_import").mkdir()
    (packages / "cuda_at_import/__init__.py").write_text(f"kept = open({os.fspath(node)!r})")
    try:
        _, ready = run(gpulaunch, tmp_path, packages, ["cuda_at_import"], "pass")
    finally:
        node.unlink()

    assert "GPU driver" in ready["refused"]["cuda_at_import"]


def test_ranks_share_the_memory_of_what_was_preloaded(gpulaunch, tmp_path: Path, packages: Path) -> None:
    """Positive and negative control: a forked rank owns a fraction of what a spawned one does."""
    program = """
        import torch
        with open("/proc/self/smaps_rollup") as rollup:
            private = sum(int(line.split()[1]) for line in rollup if line.startswith("Private"))
        print("PRIVATE", private)
    """
    private = {}
    for method in ("fork", "spawn"):
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(program))
        ended = gpulaunch("--nproc", "2", "--start-method", method, "--job-dir", tmp_path / method, script)
        private[method] = min(int(line.split()[-1]) for line in ended.stdout.splitlines() if "PRIVATE" in line)

    assert private["fork"] * 2 < private["spawn"]


def test_what_an_import_makes_for_its_process_outlives_the_first_rank_and_not_the_job(
    gpulaunch, tmp_path: Path, packages: Path
) -> None:
    """A temporary directory made while a package is imported: one for all ranks, and not left behind."""
    (packages / "tempy").mkdir()
    (packages / "tempy/__init__.py").write_text("import tempfile; kept = tempfile.TemporaryDirectory()")
    program = """
        import os, tempy, time
        if os.environ["RANK"] == "0":
            raise SystemExit
        while os.path.exists(f"/proc/{os.getppid()}") and not os.path.exists("go"):
            time.sleep(0.01)
        print("STILL", os.path.isdir(tempy.kept.name), tempy.kept.name, flush=True)
    """
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(program))
    env = {"PYTHONPATH": os.fspath(packages), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = gpulaunch.start("--nproc", "2", "--preload", "tempy", "--job-dir", tmp_path / "job", script, env=env)
    until = time.monotonic() + 60
    while "rank_ended" not in events(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.02)
    (tmp_path / "go").touch()
    ended = run.wait()

    (line,) = [line for line in ended.stdout.splitlines() if "STILL" in line]
    assert "STILL True" in line
    assert not os.path.exists(line.split()[-1]), "left behind"


def events(tmp_path: Path) -> str:
    path = tmp_path / "job/events.jsonl"
    return path.read_text() if path.exists() else ""


ON_ITS_OWN = """
    import os, subprocess, sys, time
    maps = open("/proc/self/maps").read()
    print("has torch", "libtorch" in maps, os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    meets = '''if True:
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        print("met", int(ones.item()), flush=True)
        dist.destroy_process_group()  # torch 2.14 can abort at the end of a process that has not'''
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        sys.exit(subprocess.run([sys.executable, "-c", meets]).returncode)
    open("printed" + os.environ["RANK"], "w").close()
    while not (os.path.exists("printed0") and os.path.exists("printed1")):  # the first that fails ends the other
        time.sleep(0.01)
    sys.exit(3)
"""


def test_a_program_of_the_standard_library_is_forked_without_torch_and_its_children_meet(gpulaunch, tmp_path) -> None:
    """The store of each attempt imports torch once somebody connects."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(ON_ITS_OWN))

    ended = gpulaunch("--nproc", "2", "--max-restarts", "1", str(script))

    assert ended.code == 0, ended
    assert sorted(line.split("] ")[-1] for line in ended.stdout.splitlines()) == [
        *(f"has torch False {attempt}" for attempt in "0011"),
        *("met 2", "met 2"),
    ]
    events = [json.loads(line) for line in (ended.run_dir / "events.jsonl").read_text().splitlines()]
    assert "fork_server_ready" in {event["event"] for event in events}
    assert json.loads((ended.run_dir / "job.json").read_text())["preloading"]["packages"] == []
