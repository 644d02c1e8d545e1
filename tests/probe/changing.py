"""Programs that a trial changes, for test_changes.py. They are forked as ranks by the nursery of ranks.py, see there.

Not a test module. What a program tells is in `told.json`. The test finds the lines to change by the words behind them.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ranks
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from toy_model import DATA, a_model, train

SETTINGS = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order", "timeout", "batch_size")

REBUILDER = """
import functools
from torch.utils.data import DataLoader

def from_attributes(loader):  # as Accelerate does
    names = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context")
    return DataLoader(loader.dataset, batch_size=4, **{name: getattr(loader, name) for name in names})

def note_arguments(noted):  # as Lightning does
    init = DataLoader.__init__
    @functools.wraps(init)
    def wrapper(loader, *args, **kwargs):
        noted.append((args, kwargs))
        init(loader, *args, **kwargs)
    DataLoader.__init__ = wrapper
    return lambda: setattr(DataLoader, "__init__", init)

def from_arguments(noted):
    args, kwargs = noted[0]
    return DataLoader(*args, **kwargs)
"""


class Mine(DataLoader[Any]):
    """A DataLoader that has already decided some things."""

    def __init__(self, dataset: Any, **more: Any) -> None:
        super().__init__(dataset, 8, num_workers=1, **more)  # in a subclass


class Stream(IterableDataset[Any]):
    """Samples that each worker would return."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


def told_of(loader: Any) -> dict[str, Any]:
    context = loader.multiprocessing_context
    settings = {name: getattr(loader, name) for name in SETTINGS}
    return settings | {"multiprocessing_context": context and context.get_start_method()}


def error_of(construct: Callable[[], object]) -> str:
    try:
        construct()
    except Exception as error:
        return repr(error)
    return ""


def tell(told: dict[str, Any]) -> None:
    Path(os.environ["GPULAUNCH_CHANNEL_DIR"], "told.json").write_text(json.dumps(told))


def loaders() -> None:
    """Constructed in every way, and in a child."""
    by_keyword = DataLoader(DATA, batch_size=8, num_workers=1, prefetch_factor=4, timeout=9)  # by keyword
    by_position = DataLoader(DATA, 8, False, None, None, 1)  # by position
    in_a_subclass = Mine(DATA, pin_memory=False)
    stream = DataLoader(Stream(), batch_size=8)  # of a stream
    wrong = error_of(lambda: DataLoader(DATA, 8, batch_size=8))  # given twice
    unknown = error_of(lambda: DataLoader(DATA, num_worker=8))  # misspelt
    failing = error_of(lambda: DataLoader(DATA, batch_size=8))  # refused by torch

    child = os.fork()
    if child == 0:
        for _ in range(1):
            unchanged = DataLoader(DATA, batch_size=8, num_workers=1)  # by keyword, in a child
        os._exit(unchanged.num_workers)
    in_a_child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    train(a_model(), by_keyword)
    told: dict[str, Any] = {
        "by keyword": told_of(by_keyword),
        "by position": told_of(by_position),
        "in a subclass": told_of(in_a_subclass),
        "of a stream": told_of(stream),
        "samples of the stream": sum(len(inputs) for inputs, _ in stream),
        "errors": [wrong, unknown, failing],
        "in a child": in_a_child,
    }
    tell(told)


def rebuilt() -> None:
    """By a package, from the program's own."""
    packages = Path(os.environ["GPULAUNCH_CHANNEL_DIR"], "site-packages")
    packages.mkdir(exist_ok=True)
    (packages / "rebuilder.py").write_text(REBUILDER)
    sys.path.insert(0, str(packages))
    package: Any = importlib.import_module("rebuilder")
    own = DataLoader(DATA, batch_size=8)  # its own
    made = [package.from_attributes(own)]

    noted: list[Any] = []
    stop = package.note_arguments(noted)
    DataLoader(Stream(), batch_size=8, num_workers=1)  # noted
    stop()
    made.append(package.from_arguments(noted))
    tell({"rebuilt": [told_of(loader) for loader in made]})


def parallel() -> None:
    """DistributedDataParallel in a world of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(a_model(), None, find_unused_parameters=True)
    train(model, DataLoader(DATA, batch_size=8))
    told = {
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "bucket_cap_mb": model.bucket_bytes_cap >> 20,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
    }
    torch.distributed.destroy_process_group()
    tell(told)


def settings() -> None:
    """What torch is set to, before the program has its say and after."""
    before = torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    torch.set_num_threads(3)
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as workers:  # as a DataLoader does
        child = workers.submit(_threads_of_child).result()
    tell({"before": before, "after": torch.get_num_threads(), "child": child})


def _threads_of_child() -> int:
    torch.set_num_threads(3)
    return torch.get_num_threads()


def freezes() -> None:
    """How much more is frozen after each step than at the start."""
    start = gc.get_freeze_count()
    frozen = []
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, _ in DataLoader(DATA, batch_size=32):
        model(inputs).sum().backward()
        frozen.append(gc.get_freeze_count() - start)
        optimizer.step()
    tell({"frozen": [*frozen, gc.get_freeze_count() - start]})


def started() -> None:
    """Of a rank that is a process of its own, and starts itself once more."""
    loader = DataLoader(DATA, batch_size=8)  # of a script
    print(json.dumps([loader.num_workers, torch.get_num_threads()]), flush=True)
    if "again" in sys.argv:
        subprocess.run([sys.executable, __file__, "started"], check=True)


if __name__ == "__main__":
    if "started" in sys.argv:
        started()
    else:
        vars(ranks).update({name: thing for name, thing in list(globals().items()) if inspect.isfunction(thing)})
        ranks.nursery()
