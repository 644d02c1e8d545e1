"""Programs that load data, for test_loading.py. They are forked as ranks by the nursery of ranks.py, see there.

Not a test module, and importable: spawned dataloader workers import it to find their datasets.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ranks
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

SAMPLES = 96


class Samples(Dataset[torch.Tensor]):
    """96 samples, each made in its own way."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.make(index)
        return torch.full((4,), float(index))

    def make(self, index: int) -> None:
        """At once."""


class Computed(Samples):
    def make(self, index: int) -> None:
        until_s = time.thread_time() + 0.002
        while time.thread_time() < until_s:
            pass


class Waited(Samples):
    def make(self, index: int) -> None:
        time.sleep(0.01)


class ComputedByAThread(Samples):
    """The fetching thread only waits."""

    def make(self, index: int) -> None:
        thread = threading.Thread(target=Computed().make, args=(index,))
        thread.start()
        thread.join()


class ComputedByAProcess(Samples):
    """For longer than a fork takes, as `subprocess.run(["ffmpeg", ...])` does."""

    def make(self, index: int) -> None:
        if (helper := os.fork()) == 0:
            for _ in range(10):
                Computed().make(index)
            os._exit(0)
        os.waitpid(helper, 0)


class Read(Samples):
    def make(self, index: int) -> None:
        with open(os.environ["DATA"], "rb") as file:
            assert len(file.read()) == 65536


class Broken(Samples):
    def make(self, index: int) -> None:
        if index == 50:
            raise KeyError("sample 50 is broken")


class Nested(Samples):
    """A dataset that is made of another one's batches."""

    def make(self, index: int) -> None:
        assert len(list(DataLoader(Samples(), batch_size=48))) == 2


class Late(Samples):
    """The third sample waits until it is allowed to come."""

    def __init__(self, may_come: Any) -> None:
        self.may_come = may_come

    def make(self, index: int) -> None:
        if index == 2:
            self.may_come.wait(60)


class Stream(IterableDataset[torch.Tensor]):
    """The same samples; each worker gives its share."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (torch.full((4,), float(index)) for index in range(first, SAMPLES, step))


def load(dataset: Any, **how: Any) -> None:
    context = {"multiprocessing_context": "fork"} if how.get("num_workers", 2) else {}
    assert len(list(DataLoader(dataset, **{"batch_size": 8, "num_workers": 2, **context, **how}))) == 12


def two_epochs() -> None:
    """24 batches of 8 samples by 2 workers, started and kept as the environment says."""
    loader = DataLoader(
        Stream() if os.environ["KIND"] == "iterable" else Samples(),
        batch_size=8,
        num_workers=2,
        multiprocessing_context=os.environ["HOW"],
        persistent_workers=os.environ["KEPT"] == "yes",
    )
    for _ in range(2):
        assert sorted(sample for batch in loader for sample in batch[:, 0].tolist()) == list(range(SAMPLES))


def computes() -> None:
    load(Computed())


def waits() -> None:
    load(Waited())


def computes_in_a_thread() -> None:
    load(ComputedByAThread())


def computes_in_a_process() -> None:
    load(ComputedByAProcess())


def reads() -> None:
    load(Read())


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.01)
    return torch.stack(samples)


def collates() -> None:
    load(Samples(), collate_fn=slow_collate)


def breaks() -> None:
    with pytest.raises(KeyError, match="sample 50 is broken"):
        load(Broken())


def nests() -> None:
    load(Nested())


def has_no_workers() -> None:
    load(Samples(), num_workers=0)


def starts_a_program() -> None:
    """A program with the rank's environment that loads with workers of its own."""
    subprocess.run([sys.executable, __file__, "computes"], check=True)


def late_batch() -> None:
    """The third batch comes 1 s after it was asked for; the fourth is there by then, and has to wait for it."""
    may_come = multiprocessing.get_context("fork").Event()
    loader = DataLoader(Late(may_come), batch_size=1, num_workers=2, multiprocessing_context="fork", prefetch_factor=3)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    wait_for(iterator._data_queue.qsize)
    threading.Timer(1.0, may_come.set).start()
    assert next(iterator)[0, 0] == 2
    del iterator


def ready_batches() -> None:
    """Every batch is there when it is asked for; to get it across is all that takes time."""
    loader = DataLoader(Samples(), batch_size=8, num_workers=2, multiprocessing_context="fork", prefetch_factor=6)
    iterator = iter(loader)
    wait_for(lambda: iterator._data_queue.qsize() == 12)
    assert len(list(iterator)) == 12


def wait_for(condition: Any) -> None:
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def tells_of_itself() -> None:
    """12 steps, an evaluation, autocast, a DataParallel: all that the facts are made of."""
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
    training = DataLoader(ranks.DATA, batch_size=8, prefetch_factor=3, **workers)
    evaluation = DataLoader(ranks.DATA, batch_size=16)
    DataLoader(Stream(), batch_size=None)  # never used
    model = nn.DataParallel(ranks.a_model())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        ranks.train(model, training)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for inputs, _ in evaluation:
            model(inputs)


def trains_lazy_layers() -> None:
    """The optimizer is made while nobody knows the size of what it optimizes: such a parameter lets nobody look."""
    model = nn.Sequential(nn.LazyLinear(4, dtype=torch.float64), nn.Linear(4, 2, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(torch.ones(32, 3, dtype=torch.float64), batch_size=8):
        model(batch).sum().backward()
        optimizer.step()


def is_watched_by_a_mode() -> None:
    """What looks at parameters once a second is none of the program's calls."""
    from torch.overrides import TorchFunctionMode

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(torch.overrides.resolve_name(func) or str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.ones(8, 2), batch_size=8)
    with Watching():
        for batch in loader:
            model(batch)
    assert "torch.nn.functional.linear" in seen
    assert [name for name in seen if name in ("torch.Tensor.numel", "torch.Tensor.dtype.__get__")] == []
    optimizer.zero_grad()


def accelerated() -> None:
    """Accelerate makes a dataloader of its own from the program's."""
    from accelerate.data_loader import prepare_data_loader

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    training = DataLoader(ranks.DATA, batch_size=8)
    prepared = prepare_data_loader(training, num_processes=1, process_index=0)
    assert prepared is not training
    assert len(list(prepared)) == 12


class MyLoader(DataLoader[Any]):
    def __init__(self, dataset: Any, word: str, **how: Any) -> None:
        super().__init__(dataset, **how)
        self.word = word


def looks_at_the_class() -> None:
    """What frameworks ask of DataLoader is answered as ever."""
    parameters = list(inspect.signature(DataLoader).parameters)
    assert parameters[:3] == ["dataset", "batch_size", "shuffle"]
    assert inspect.getfullargspec(DataLoader.__init__).args[:3] == ["self", "dataset", "batch_size"]
    assert pickle.loads(pickle.dumps(DataLoader)) is DataLoader
    assert pickle.loads(pickle.dumps(DataLoader.__init__)) is DataLoader.__init__
    mine = MyLoader(Samples(), "mine", batch_size=8)
    assert (type(mine), mine.word, mine.batch_size, len(list(mine))) == (MyLoader, "mine", 8, 12)
    assert pickle.loads(pickle.dumps(mine)).word == "mine"
    with pytest.raises(ValueError, match="num_workers option should be non-negative"):
        DataLoader(Samples(), num_workers=-1)
    with pytest.raises(TypeError, match="dataset"):
        DataLoader()  # type: ignore[call-arg]


if __name__ == "__main__":
    vars(ranks).update({name: thing for name, thing in list(globals().items()) if inspect.isfunction(thing)})
    if len(sys.argv) > 1:
        sys.exit(ranks.run(sys.argv[1]))
    ranks.nursery()
