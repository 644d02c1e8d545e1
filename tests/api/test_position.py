"""A loop that is left at any step and begun again sees the same samples and draws the same numbers as one that is not.

In one process: "again" means new objects, as a new process would make them, over the same checkpoint directory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gpulaunch.checkpoint import Checkpoint, CheckpointError
from gpulaunch.checkpoint.position import Feed, Position

pytestmark = pytest.mark.torch

EPOCHS = 3


class Numbered(Dataset):
    """Its items are their numbers; `noisy`: with a random number each, drawn where the item is loaded."""

    def __init__(self, size: int = 23, *, noisy: bool = False) -> None:
        self.size = size
        self.noisy = noisy

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item() + random.random() if self.noisy else 0.0


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def shared_generator(**options: object) -> DataLoader:
    """RandomSampler and the loader draw from one generator, as the documentation of torch recommends."""
    return DataLoader(Numbered(), 4, shuffle=True, generator=generator(), **options)


WORKERS = {"num_workers": 2}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
LOADERS: dict[str, Callable[[], DataLoader]] = {
    "in order": lambda: DataLoader(Numbered(), 4),
    "shuffled": lambda: DataLoader(Numbered(), 4, shuffle=True),
    "shuffled, augmented": lambda: DataLoader(Numbered(noisy=True), 4, shuffle=True),
    "shuffled, drop_last": lambda: DataLoader(Numbered(), 4, shuffle=True, drop_last=True),
    "shuffled, one by one": lambda: DataLoader(Numbered(), None, sampler=RandomSampler(Numbered())),
    "shuffled, batches of 1": lambda: DataLoader(Numbered(), 1, shuffle=True),
    "own generator": shared_generator,
    "with replacement": lambda: DataLoader(Numbered(), 4, sampler=RandomSampler(Numbered(), replacement=True)),
    "with replacement, own generator": lambda: DataLoader(
        Numbered(), 4, sampler=RandomSampler(Numbered(), replacement=True, num_samples=70, generator=generator())
    ),
    "a subset": lambda: DataLoader(Numbered(), 4, sampler=SubsetRandomSampler(range(3, 20))),
    "weighted": lambda: DataLoader(Numbered(), 4, sampler=WeightedRandomSampler([0.1, 0.9] * 11, 22)),
    "distributed": lambda: DataLoader(
        Numbered(), 4, sampler=DistributedSampler(Numbered(), num_replicas=2, rank=1, seed=3)
    ),
    "batch sampler": lambda: DataLoader(
        Numbered(), batch_sampler=BatchSampler(RandomSampler(Numbered()), 5, drop_last=False)
    ),
    "batch sampler of its own kind": lambda: DataLoader(Numbered(), batch_sampler=[[1, 2], [7], [3, 4, 5], [6]]),
    "workers": lambda: DataLoader(Numbered(), 4, shuffle=True, **WORKERS),
    "workers, own generator": lambda: shared_generator(**WORKERS),
    "persistent workers": lambda: DataLoader(Numbered(), 4, shuffle=True, **PERSISTENT),
    "persistent workers, own generator": lambda: shared_generator(**PERSISTENT),
    "a stream": lambda: DataLoader(Stream(), 4),
}


class Loop:
    """A training loop that notes what it sees and draws: a list of one text per step."""

    def __init__(self, loader: DataLoader, directory: Path, *, epochs: int = EPOCHS, replay: str = "index") -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(11)
        self.loader = loader
        self.epochs = epochs
        self.replay = replay
        model = torch.nn.Linear(1, 1)
        self.ckpt = Checkpoint(model=model, dir=directory, keep=None)
        self.seen: dict[int, str] = {}

    def run(self, *, stop_after: int | None = None, save_at: frozenset[int] = frozenset()) -> Loop:
        self.ckpt.resume()
        if stop_after == 0:
            return self
        for epoch in self.ckpt.epochs(self.epochs):
            torch.rand(1)  # between the epochs a program may draw, too
            for batch in self.ckpt.batches(self.loader, replay=self.replay):
                drawn = (torch.rand(1).item(), random.random(), np.random.rand())
                step = self.ckpt.steps_done + 1
                self.seen[step] = f"epoch {epoch} {batch} {drawn}"
                self.ckpt.step(save=step in save_at)
                if step == stop_after:
                    self.ckpt.wait()
                    return self
        return self


def torn_down(loop: Loop) -> dict[int, str]:
    """What it has seen; its workers are ended."""
    loop.loader._iterator = None
    return loop.seen


@pytest.mark.parametrize("kind", LOADERS)
def test_every_later_step_is_the_same(kind: str, tmp_path: Path) -> None:
    undisturbed = torn_down(Loop(LOADERS[kind](), tmp_path / "undisturbed").run())
    steps = len(undisturbed)
    per_epoch = steps // EPOCHS

    for stop in (1, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch + 2):
        directory = tmp_path / f"stopped after {stop}"
        torn_down(Loop(LOADERS[kind](), directory).run(stop_after=stop, save_at=frozenset({stop})))
        resumed = torn_down(Loop(LOADERS[kind](), directory).run())

        assert resumed == {step: seen for step, seen in undisturbed.items() if step > stop}, f"from step {stop}"


def test_again_and_again(tmp_path: Path) -> None:
    """Each life makes a few steps; what they saw, put together, is what one life sees."""
    undisturbed = torn_down(Loop(LOADERS["persistent workers"](), tmp_path / "undisturbed").run())

    seen: dict[int, str] = {}
    for stop in (2, 3, 7, 8, 13):
        loop = Loop(LOADERS["persistent workers"](), tmp_path / "lives")
        seen |= torn_down(loop.run(stop_after=stop, save_at=frozenset({stop})))
    seen |= torn_down(Loop(LOADERS["persistent workers"](), tmp_path / "lives").run())

    assert seen == undisturbed


def test_augmentations_in_workers_need_their_batches_loaded(tmp_path: Path) -> None:
    """By index the order is exact and the workers' numbers are not; `replay="load"` makes them so as well."""

    def noisy() -> DataLoader:
        return DataLoader(Numbered(noisy=True), 4, shuffle=True, **WORKERS)

    undisturbed = torn_down(Loop(noisy(), tmp_path / "undisturbed").run())

    for replay, exact in (("load", True), ("index", False)):
        torn_down(Loop(noisy(), tmp_path / replay).run(stop_after=9, save_at=frozenset({9})))
        resumed = torn_down(Loop(noisy(), tmp_path / replay, replay=replay).run())

        assert (resumed == {step: seen for step, seen in undisturbed.items() if step > 9}) is exact


def test_skipped_samples_are_not_loaded(tmp_path: Path) -> None:
    loaded: list[int] = []

    class Noting(Numbered):
        def __getitem__(self, index: int) -> tuple[int, float]:
            loaded.append(index)
            return super().__getitem__(index)

    Loop(DataLoader(Noting(), 4), tmp_path).run(stop_after=4, save_at=frozenset({4}))
    loaded.clear()
    Loop(DataLoader(Noting(), 4), tmp_path, epochs=1).run()

    assert loaded == list(range(16, 23))


def test_a_finished_run_has_nothing_left_to_do_and_can_be_prolonged(tmp_path: Path) -> None:
    make = LOADERS["persistent workers"]
    longer = torn_down(Loop(make(), tmp_path / "longer", epochs=EPOCHS + 1).run())
    torn_down(Loop(make(), tmp_path / "finished").run())

    assert torn_down(Loop(make(), tmp_path / "finished").run()) == {}
    more = torn_down(Loop(make(), tmp_path / "finished", epochs=EPOCHS + 1).run())
    assert more == {step: seen for step, seen in longer.items() if "epoch 3" in seen}
    assert len(more) == len(longer) // (EPOCHS + 1)


class Stateful:
    """A loader that saves its own position, as torchdata's StatefulDataLoader does."""

    _iterator = None

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_that_saves_itself_is_left_to_do_so(tmp_path: Path) -> None:
    undisturbed = Loop(Stateful(), tmp_path / "undisturbed").run().seen

    Loop(Stateful(), tmp_path / "stopped").run(stop_after=13, save_at=frozenset({13}))
    resumed = Loop(Stateful(), tmp_path / "stopped").run().seen

    assert resumed == {step: seen for step, seen in undisturbed.items() if step > 13}


def test_an_iterator_is_refused(tmp_path: Path) -> None:
    loop = Loop(iter([1, 2]), tmp_path)

    with pytest.raises(CheckpointError, match="pass the loader itself"):
        loop.run()


def test_the_sampler_may_stand_beside_the_loader(tmp_path: Path) -> None:
    """Then its set_epoch is called all the same."""
    sampler = DistributedSampler(Numbered(), num_replicas=1, rank=0)
    ckpt = Checkpoint(model=torch.nn.Linear(1, 1), dir=tmp_path)
    ckpt.resume()

    epochs = []
    for _ in ckpt.epochs(3):
        for _ in ckpt.batches([1, 2], sampler):
            ckpt.step()
        epochs.append(sampler.epoch)

    assert epochs == [0, 1, 2]


def test_sequential_sampler_is_known() -> None:
    """torch's plain loader has what the code looks at: `batch_sampler.sampler` and `batch_size`."""
    loader = DataLoader(Numbered(), 4)

    assert isinstance(loader.batch_sampler.sampler, SequentialSampler)
    assert loader.batch_sampler.batch_size == 4


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (4, 2), (3, 4)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_another_number_of_ranks_goes_on_after_what_all_have_seen(before: int, after: int, steps: int) -> None:
    """No sample of the epoch is left out; fewer are seen twice than there are ranks."""
    data = Numbered(240)

    def feed(rank: int, ranks: int, position: Position) -> Feed:
        sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, seed=3)
        made = Feed(DataLoader(data, 4, sampler=sampler), None, position, ranks)
        made.open("index")
        return made

    seen: list[int] = []
    for rank in range(before):
        first = feed(rank, before, Position(epoch=1, world_size=before))
        for _, (indices, _) in zip(range(steps), first, strict=False):
            seen += indices.tolist()
        saved = first.position()
    assert sorted(set(seen)) == sorted(seen)
    rest: list[int] = []
    for rank in range(after):
        second = feed(rank, after, saved)
        rest += [index for indices, _ in second for index in indices.tolist()]
        third = feed(rank, after, second.position())  # and once more: at the end of the epoch nothing is left
        assert list(third) == []

    assert set(seen) | set(rest) == set(range(240))
    assert len(set(seen) & set(rest)) < after


def test_another_batch_size_goes_on_after_what_was_seen() -> None:
    data = Numbered(40)
    first = Feed(DataLoader(data, 4), None, Position(), 1)
    first.open("index")
    for _ in zip(range(3), first, strict=False):
        pass

    second = Feed(DataLoader(data, 6), None, first.position(), 1)
    second.open("index")

    assert next(indices.tolist() for indices, _ in second) == [12, 13, 14, 15, 16, 17]
