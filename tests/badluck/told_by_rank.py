"""A training program that says of itself what has been done to the torch that it runs in, and knows no gpulaunch.

Not a test: it is run by plain Python, under gpulaunch, and under gpulaunch --no-profile. Into the directory named by
TELL it writes one JSON file for its main process and one for each dataloader worker:

    functions   every function of torch's modules and classes, by where it is found: a fingerprint of its code
    ours        those whose code is in a file of gpulaunch's profiler
    alive       functions that such a file has made in this process, wherever they are: every tap is one
    modules     the modules of gpulaunch that were imported
    maps        files of a gpulaunch run that are mapped, or open
    hooks       torch's own lists of whom to call, and Python's: by their sizes
    threads     how many threads of Python there are
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch._dynamo
from torch.utils.data import DataLoader, Dataset


def tell(who: str) -> None:
    warnings.simplefilter("ignore")  # torch has modules that complain when they are looked at
    path = os.path.join(os.environ["TELL"], f"{who}.json")
    found = dict(functions_of_torch())
    report = {
        "pid": os.getpid(),
        "functions": {place: fingerprint(function) for place, function in found.items()},
        "ours": sorted(place for place, function in found.items() if is_ours(function)),
        "alive": sorted({f.__code__.co_qualname for f in gc.get_objects() if is_ours(f) and is_made(f)}),
        "modules": sorted(name for name in sys.modules if name.partition(".")[0] == "gpulaunch"),
        "maps": sorted(
            {line.split()[-1] for line in open("/proc/self/maps") if "/gpulaunch-" in line} | set(open_files())
        ),
        "hooks": hooks(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }
    with open(path + ".part", "w") as file:
        json.dump(report, file)
    os.rename(path + ".part", path)


def functions_of_torch() -> Iterator[tuple[str, FunctionType]]:
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or not isinstance(module, ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, FunctionType):
                yield f"{name}.{attribute}", value
            elif isinstance(value, type) and value.__module__.partition(".")[0] == "torch" and id(value) not in seen:
                seen.add(id(value))
                for inner, method in list(vars(value).items()):
                    function = getattr(method, "__func__", getattr(method, "fget", method))
                    if isinstance(function, FunctionType):
                        yield f"{value.__module__}.{value.__qualname__}.{inner}", function


def is_ours(value: Any) -> bool:
    return type(value) is FunctionType and "/gpulaunch/profiler/" in value.__code__.co_filename


def is_made(function: FunctionType) -> bool:
    """Whether another function has made it, as a tap is made; else it is there because its module was imported."""
    return "<locals>" in function.__code__.co_qualname


def fingerprint(function: FunctionType) -> str:
    code = function.__code__
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}:{hash_of(code.co_code)}"


def hash_of(data: bytes) -> int:
    total = 0
    for byte in data:
        total = (total * 31 + byte) % (1 << 32)
    return total


def open_files() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "/gpulaunch-" in target:
            yield target


def hooks() -> dict[str, int]:
    optimizer = sys.modules["torch.optim.optimizer"]
    callbacks = sys.modules["torch._dynamo.callback"].callback_handler
    return {
        "optimizer pre": len(optimizer._global_optimizer_pre_hooks),
        "optimizer post": len(optimizer._global_optimizer_post_hooks),
        "compile start": len(callbacks.start_callbacks),
        "compile end": len(callbacks.end_callbacks),
        "gc": len(gc.callbacks),
        "import": len(sys.meta_path),
    }


class Data(Dataset[torch.Tensor]):
    """Numbers; a worker tells of itself at the first one."""

    def __init__(self, told_as: str) -> None:
        self.told_as = told_as

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and index == 0:
            tell(self.told_as)
        return torch.zeros(4) + index


def main() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for way in ("fork", "spawn"):
        for batch in DataLoader(Data(way), batch_size=2, num_workers=1, multiprocessing_context=way):
            model(batch).sum().backward()
            optimizer.step()
    tell("rank")
    print("READY", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
