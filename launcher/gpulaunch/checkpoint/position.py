"""A rank's position in the data, and how a loader is brought back to it.

What determines an epoch's order is recorded when its iterator is made: that is when RandomSampler and DataLoader draw
their seeds. To resume, the same state is restored, the iterator is made again, and the batches that were trained on are
skipped by index, so that none of them is loaded. A worker's own random numbers (augmentations) depend on the batches it
has loaded, so for them `replay="load"` loads and discards instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from gpulaunch.checkpoint import random_state
from gpulaunch.checkpoint.messages import CheckpointError

Replay = Literal["index", "load"]


@dataclass(kw_only=True)
class Position:
    """A rank's position in an epoch. Plain values and tensors only."""

    epoch: int = 0
    world_size: int = 1
    start: int = 0
    """Units (samples; whole batches if a batch has no fixed size) that all ranks together had completed when the
    world size last changed within this epoch."""
    batches: int = 0
    """Batches of this rank since then."""
    batch_units: int = 1
    """Units per batch."""
    reused: bool = False
    """Whether the loader's persistent workers had served an epoch before."""
    rng: random_state.States | None = None
    """The random states when the epoch's iterator was made. None: between two epochs."""
    generators: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """States, at that time, of the generators that belong to the loader and its samplers."""
    loader: Any = None
    """The loader's own state, if it can save itself (torchdata's StatefulDataLoader)."""

    def on(self, world_size: int, batch_units: int) -> Position:
        """The same position for other ranks or batches: after the samples that all ranks together have completed."""
        if (world_size, batch_units) == (self.world_size, self.batch_units) or self.rng is None:
            return replace(self, world_size=world_size, batch_units=batch_units)
        skipped = self.start // self.world_size * self.world_size  # what each rank had really skipped
        return Position(
            epoch=self.epoch,
            world_size=world_size,
            start=skipped + self.batches * self.batch_units * self.world_size,
            batch_units=batch_units,
            reused=self.reused,
            rng=self.rng,
            generators=self.generators,
        )


class Feed:
    """One epoch's batches, counted."""

    def __init__(self, loader: Iterable[Any], sampler: Any, position: Position, world_size: int) -> None:
        """`position` is where to begin: within an epoch, or at the start of one."""
        self._loader: Any = loader
        self._at = position.on(world_size, self._units())
        self._iterator: Iterator[Any] = iter(())
        self._generators = _generators(loader, sampler)
        for each in _samplers(loader, sampler):
            if hasattr(each, "set_epoch"):
                each.set_epoch(position.epoch)

    def position(self) -> Position:
        """The training loop's position. Called at step boundaries."""
        return replace(self._at, loader=self._loader.state_dict() if self._is_stateful else None)

    def next_epoch(self) -> Position:
        """The training loop's position after this epoch."""
        reused = self._at.reused or _has_served(self._loader)
        return Position(epoch=self._at.epoch + 1, world_size=self._at.world_size, reused=reused)

    def open(self, replay: Replay) -> None:
        """Make the loader's iterator; it draws everything that it draws for the order of the epoch."""
        self._iterator = self._begin() if self._at.rng is None else self._again(replay)

    def __iter__(self) -> Iterator[Any]:
        """The batches from the position on, each counted when it is returned."""
        # Referenced only here: it is freed with the loop, as in a plain loop, and torch then ends its workers in order.
        iterator, self._iterator = self._iterator, iter(())
        for batch in iterator:
            self._at.batches += 1
            yield batch

    def _begin(self) -> Iterator[Any]:
        """The epoch from its start."""
        self._at.reused = self._at.reused or _has_served(self._loader)
        if self._at.reused and not _has_served(self._loader):
            self._serve_once()
        self._at.rng = random_state.capture()
        self._at.generators = [generator.get_state() for generator in self._generators]
        return self._new_iterator()

    def _again(self, replay: Replay) -> Iterator[Any]:
        """The epoch from the position on."""
        assert self._at.rng is not None, "this epoch was started before"
        if self._at.reused and not _has_served(self._loader):
            self._serve_once()
        random_state.restore(self._at.rng)
        for generator, state in zip(self._generators, self._at.generators, strict=False):
            generator.set_state(state)
        if self._is_stateful and self._at.loader is not None:
            self._loader.load_state_dict(self._at.loader)
            return self._new_iterator()
        behind = self._at.start // self._at.world_size  # units that this rank skips
        if self._is_stateful or not self._is_indexed or replay == "load":
            iterator = self._new_iterator()
            for _ in islice(iterator, behind // self._units() + self._at.batches):
                pass
            return iterator
        if self._units() == 1:
            return self._skipping(behind + self._at.batches)
        if behind:
            batch_sampler = self._loader.batch_sampler
            batch_sampler.sampler = _Skipping(batch_sampler.sampler, behind)
        return self._skipping(self._at.batches)

    def _skipping(self, count: int | None) -> Iterator[Any]:
        """The loader's normal iterator, but without its first `count` batches (None: without any)."""
        if _has_served(self._loader):
            holder, name = self._loader._iterator, "_index_sampler"
        else:
            holder, name = self._loader, "batch_sampler" if self._loader.batch_sampler is not None else "sampler"
        inner = getattr(holder, name)
        skipping = _Skipping(inner, count)
        # DataLoader forbids users to set this: they would expect it to affect more than its next iterator.
        object.__setattr__(holder, name, skipping)
        try:
            iterator = self._new_iterator()
        finally:
            object.__setattr__(holder, name, inner)
        skipping.prime()
        return iterator

    def _serve_once(self) -> None:
        """Make and discard a first iterator: only then a loader with persistent workers draws a seed for them.

        The resumed run had drawn it in an earlier epoch.
        """
        before, own = random_state.capture(), [generator.get_state() for generator in self._generators]
        self._skipping(None)
        random_state.restore(before)
        for generator, state in zip(self._generators, own, strict=True):
            generator.set_state(state)

    def _new_iterator(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._loader)
        return iterator

    @property
    def _is_indexed(self) -> bool:
        return isinstance(self._loader, DataLoader) and not isinstance(self._loader.dataset, IterableDataset)

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def _units(self) -> int:
        batch_sampler = getattr(self._loader, "batch_sampler", None) if self._is_indexed else None
        size = getattr(batch_sampler, "batch_size", None)
        return size if isinstance(size, int) and hasattr(batch_sampler, "sampler") else 1


class _Skipping:
    """A sampler without its first `count` items, once; after that the plain sampler. None: empty, once."""

    def __init__(self, inner: Any, count: int | None) -> None:
        self.inner = inner
        self.count = count
        self._latest: _Items | None = None

    def __iter__(self) -> Iterator[Any]:
        self._latest = _Items(self)
        return self._latest

    def prime(self) -> None:
        """Draw the seed that a sampler draws with its first item.

        A loader with workers has requested that item by now. One without would do so after the random state of the next
        training step has been set.
        """
        if self._latest is not None:
            self._latest.prime()

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Items(Iterator[Any]):
    """One pass over a `_Skipping`. It begins with the first item: a loader makes two passes, and uses the second."""

    def __init__(self, owner: _Skipping) -> None:
        self._owner = owner
        self._items: Iterator[Any] | None = None

    def prime(self) -> Iterator[Any]:
        if self._items is None:
            count, self._owner.count = self._owner.count, 0
            items: Iterator[Any] = iter(()) if count is None else iter(self._owner.inner)
            self._items = chain(list(islice(items, count, (count or 0) + 1)), items)
        return self._items

    def __next__(self) -> Any:
        return next(self.prime())


def check_loader(loader: object) -> None:
    """Raise for a loader that cannot be iterated again."""
    if isinstance(loader, Iterator):
        raise CheckpointError(
            "batches() was given an iterator, which cannot be restarted; pass the loader itself, not iter(loader)"
        )


def _has_served(loader: Any) -> bool:
    """Whether the loader has persistent workers that are running: torch keeps their iterator."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def _samplers(loader: Any, sampler: Any) -> list[Any]:
    """Everything that may determine the order, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = (sampler, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(each): each for each in candidates if each is not None}.values())


def _generators(loader: Any, sampler: Any) -> list[torch.Generator]:
    """torch generators that belong to the loader or a sampler, each once."""
    found = (getattr(each, "generator", None) for each in (loader, *_samplers(loader, sampler)))
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
