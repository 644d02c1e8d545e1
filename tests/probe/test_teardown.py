"""A program that has finished ends: the process group is destroyed where the GIL is released."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.profiler.probe.teardown import release_process_group_last

# DDP in a function, destroy_process_group(), return: as the examples of PyTorch end. That the last allreduce is still
# being cleaned up by then is chance in a real program (9 of 40 runs of two ranks). Here `Late` begins one in a
# backward, as DDP does, and does not wait for it: forked, 14 of 14 runs hung without what is tested here.
#
# torchrun has it as well. With torch 2.13.0 (CPU), 10 of 10 runs of two ranks hung in it where the program begins with
# `import torch._dynamo`, and none of 6 with torch 2.14.1. As it stands, 0 of 12 hung and 3 of 12 were aborted at exit
# (SIGABRT): DDP imports torch._dynamo only after the process group was made, and the default arguments of
# torch.distributed.nn.functional then keep the group to the end. A forked rank has imported it before, as has a program
# that imports transformers' Trainer, or compiles, before it makes the group.
FINISHED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        ctx.group.allreduce([torch.zeros(1)])
        ctx.group = None
        return grad, None


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    model(torch.randn(4, 8)).mean().backward()
    group = dist.group.WORLD
    dist.destroy_process_group()
    Late.apply(torch.zeros(1, requires_grad=True), group).backward()
    del group


main()
print("main has returned")
"""


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(FINISHED)
    return script


@pytest.mark.torch
@pytest.mark.parametrize("options", [(), ("--no-profile", "--start-method", "spawn")], ids=["forked", "spawned, bare"])
def test_a_finished_program_ends(gpulaunch: Any, tmp_path: Path, finished: Path, options: tuple[str, ...]) -> None:
    ended = gpulaunch("--nproc", "2", "--job-dir", tmp_path / "job", *options, finished)

    assert ended.code == 0, ended
    assert ended.stdout.count("main has returned") == 2


class Part:
    """Something that notes when the last that held it has let go."""

    def __init__(self, name: str, gone: list[str]) -> None:
        self.name, self.gone = name, gone

    def __del__(self) -> None:
        self.gone.append(self.name)


def a_torch(gone: list[str], *, with_group: bool = True) -> types.ModuleType:
    """A stand-in for torch.nn.parallel.distributed: a module of many attributes, the group before the reducer."""

    class DistributedDataParallel:
        def __init__(self) -> None:
            if with_group:
                self.process_group = Part("group", gone)
            for number in range(40):
                setattr(self, f"setting_{number}", number)
            self._ddp_init_helper("parameters", bucket=1)

        def _ddp_init_helper(self, parameters: str, *, bucket: int) -> None:
            assert (parameters, bucket) == ("parameters", 1)
            self.reducer = Part("reducer", gone)

    module = types.ModuleType("torch.nn.parallel.distributed")
    module.DistributedDataParallel = DistributedDataParallel  # type: ignore[attr-defined]
    return module


def test_the_group_goes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[str] = []
    module: Any = a_torch(gone)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    module.DistributedDataParallel()
    assert gone == ["group", "reducer"], "as torch has it"
    gone.clear()

    release_process_group_last()
    helper = module.DistributedDataParallel._ddp_init_helper
    release_process_group_last()
    assert module.DistributedDataParallel._ddp_init_helper is helper, "once"

    model = module.DistributedDataParallel()
    assert len(vars(model)) == 42
    del model
    assert gone == ["reducer", "group"]


def test_another_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a group of its own in the module; one whose module has another name for what makes the reducer."""
    gone: list[str] = []
    module: Any = a_torch(gone, with_group=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    release_process_group_last()
    module.DistributedDataParallel()
    assert gone == ["reducer"]

    other: Any = types.ModuleType(module.__name__)
    monkeypatch.setitem(sys.modules, module.__name__, other)
    release_process_group_last()
    other.DistributedDataParallel = type("DistributedDataParallel", (), {})
    release_process_group_last()
    assert "_ddp_init_helper" not in vars(other.DistributedDataParallel)
