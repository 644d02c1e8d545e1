"""accelerate, as a user of the command line and as a caller of torchrun's library face."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"),
]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PET_START_METHOD")
    monkeypatch.delenv("GPULAUNCH_NO_PROFILE")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("test_sync", "[0] **Test Distributed `no_sync` context manager**"),
        ("test_script", "[0] Training yielded the same results on one CPU or distributed setup with batch split."),
    ],
)
def test_its_own_test_scripts_pass_on_forked_ranks(gpulaunch: Any, script: str, said: str) -> None:
    ended = gpulaunch("--nproc", "2", "-m", f"accelerate.test_utils.scripts.{script}")

    assert ended.code == 0, str(ended)
    assert said in ended.stdout.splitlines()


def test_accelerate_launch_runs_on_our_engine(call: Callable[[str], str]) -> None:
    """Its launcher filters its arguments through our parser and gives the namespace to our `run`."""
    printed = call("""
        import sys
        import torch.distributed
        from gpulaunch.compat import torchrun
        sys.modules["torch.distributed.run"] = torch.distributed.run = torchrun

        from accelerate.commands.launch import main
        sys.argv = [
            "accelerate-launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
            "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
            "-m", "accelerate.test_utils.scripts.test_cli",
        ]
        main()
    """)

    assert sorted(printed.splitlines()) == [f"[{rank}] Successfully ran on 0 GPUs" for rank in (0, 1)]


def test_a_function_of_notebook_launcher(call: Callable[[str], str]) -> None:
    printed = call("""
        import torch.distributed.launcher.api as api
        from gpulaunch.compat import torchrun
        api.elastic_launch, api.LaunchConfig = torchrun.elastic_launch, torchrun.LaunchConfig

        from accelerate import Accelerator, notebook_launcher

        def train(word):
            accelerator = Accelerator(cpu=True)
            accelerator.wait_for_everyone()
            print(word, accelerator.process_index, accelerator.num_processes)

        if __name__ == "__main__":
            notebook_launcher(train, args=("hello",), num_processes=2, use_port="0")
    """)

    shown = sorted(line for line in printed.splitlines() if line.startswith("["))
    assert shown == ["[0] hello 0 2", "[1] hello 1 2"]
