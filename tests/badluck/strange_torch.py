"""torch as it may look in another version: each case in a process of its own, forked from one that has imported torch.

Not a test: `python strange_torch.py DIRECTORY` arms a rank in each of them, trains, and prints a line of JSON:

    case     its name
    losses   what was trained; it is the same for all
    hooks    bits in service, and bits that are not
    fault    what the page says about it
    taps     where torch's functions are ours
    steps    how many the page tells, of `STEPS`
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch._dynamo
from torch.utils.data import DataLoader, TensorDataset

from gpulaunch.profiler.channel import segment, segment_writer, workers
from gpulaunch.profiler.probe import inject
from gpulaunch.profiler.probe.step import PATIENCE

DATALOADER = importlib.import_module("torch.utils.data.dataloader")
OPTIMIZER = importlib.import_module("torch.optim.optimizer")
C10D = importlib.import_module("torch.distributed.distributed_c10d")
FETCH = importlib.import_module("torch.utils.data._utils.fetch")
WORKER = importlib.import_module("torch.utils.data._utils.worker")
PARALLEL = importlib.import_module("torch.nn.parallel.data_parallel")
DDP = importlib.import_module("torch.nn.parallel.distributed")
AUTOCAST = importlib.import_module("torch.amp.autocast_mode")
STEPS = PATIENCE + 8
NEXT = DATALOADER._BaseDataLoaderIter.__next__
RUN_BACKWARD = torch.autograd._engine_run_backward


class Callback:
    """A thing that can be called and is no function of Python's, as a method in C would be."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._function(instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def next_takes_more() -> None:
    DATALOADER._BaseDataLoaderIter.__next__ = lambda self, timeout=0: NEXT(self)


def next_is_in_c() -> None:
    DATALOADER._BaseDataLoaderIter.__next__ = Callback(NEXT)


def backward_takes_more() -> None:
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = lambda outputs, *args, **kwargs: (
        RUN_BACKWARD(outputs, *args, **kwargs)
    )


def backward_is_twofold() -> None:
    torch.autograd.graph._engine_run_backward = lambda t_outputs, *args, **kwargs: None


def no_pre_hook() -> None:
    del OPTIMIZER.register_optimizer_step_pre_hook


def no_post_hook() -> None:
    del OPTIMIZER.register_optimizer_step_post_hook


def no_save() -> None:
    del torch.save


def no_all_reduce() -> None:
    del C10D.all_reduce


def no_work() -> None:
    del C10D.Work


def no_ddp() -> None:
    del DDP.DistributedDataParallel


def fetch_takes_more() -> None:
    original = FETCH._MapDatasetFetcher.fetch
    FETCH._MapDatasetFetcher.fetch = lambda self, index, device=None: original(self, index)


def no_worker_info() -> None:
    del WORKER._worker_info
    torch.utils.data.get_worker_info = lambda: None


def loader_is_made_in_c() -> None:
    DATALOADER.DataLoader.__init__ = Callback(DATALOADER.DataLoader.__init__)


def no_data_parallel() -> None:
    del PARALLEL.DataParallel


def no_autocast() -> None:
    del AUTOCAST.autocast.__enter__


def no_tolist() -> None:
    torch.Tensor.tolist = None


def no_synchronize() -> None:
    torch.cuda.Event = type("Event", (), {})


def older() -> None:
    torch.__version__ = "2.5.1+cu124"


def much_older() -> None:
    torch.__version__ = "1.13.1"


def newer() -> None:
    torch.__version__ = "3.1.0.dev20270101+git0123456"


def unnumbered() -> None:
    torch.__version__ = "parrot"


def no_switch_of_dynamo() -> None:
    del torch._C._dynamo.eval_frame._FrameAction


def as_it_is() -> None:
    pass


CASES = (as_it_is, newer, no_switch_of_dynamo, next_takes_more, next_is_in_c, backward_takes_more, backward_is_twofold,
         no_pre_hook, no_post_hook, no_save, no_all_reduce, no_work, no_ddp, fetch_takes_more, no_worker_info,
         loader_is_made_in_c, no_data_parallel, no_autocast, no_tolist, no_synchronize, older, much_older,
         unnumbered)  # fmt: skip


def train() -> list[float]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2 * STEPS, 4), torch.randn(2 * STEPS, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for inputs, targets in DataLoader(data, batch_size=2):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def taps() -> list[str]:
    """Where functions of ours have taken the place of torch's."""
    found: set[str] = set()
    owners: list[Any] = [
        *(torch, torch.serialization, torch.autograd, torch.autograd.graph, torch.distributed, C10D, torch.cuda),
        *(torch.Tensor, torch.nn.Module, torch.cuda.Event, torch.cuda.Stream, torch.accelerator),
        *(DATALOADER.DataLoader, DATALOADER._BaseDataLoaderIter, FETCH._MapDatasetFetcher),
        *(DATALOADER._MultiProcessingDataLoaderIter, FETCH._IterableDatasetFetcher),
        *(OPTIMIZER.Optimizer, AUTOCAST.autocast),
        *(getattr(PARALLEL, "DataParallel", None), getattr(DDP, "DistributedDataParallel", None)),
        getattr(C10D, "Work", None),
    ]
    for owner in owners:
        for name, value in vars(owner).items() if owner is not None else ():
            if isinstance(value, FunctionType) and "/gpulaunch/profiler/" in value.__code__.co_filename:
                found.add(f"{getattr(owner, '__name__', owner)}.{name}")
    for hooks in (OPTIMIZER._global_optimizer_pre_hooks, OPTIMIZER._global_optimizer_post_hooks):
        found |= {f"optimizer hook {hook.__name__}" for hook in hooks.values()}
    return sorted(found)


def run(directory: str, number: int, case: Callable[[], None]) -> None:
    path = f"{directory}/rank-{number}.bin"
    segment_writer.create(path, rank=number, local_rank=number, attempt=0)
    workers.create(f"{directory}/workers-{number}.bin")
    os.environ.update(RANK=str(number), GPULAUNCH_CHANNEL_DIR=directory, GPULAUNCH_DEVICE_TYPES="meta")
    case()
    inject.arm()
    placed = taps()
    losses = train()
    seen = segment.read(path)
    hooks = int(seen.hooks_armed), int(seen.hooks_unavailable)
    told = {"case": case.__name__, "losses": losses, "hooks": hooks, "fault": seen.fault, "taps": placed}
    print(json.dumps({**told, "steps": seen.steps_made}), flush=True)


def main(directory: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch has names that complain when they are looked at
    for number, case in enumerate(CASES):
        pid = os.fork()
        if pid == 0:
            try:
                run(directory, number, case)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1])
