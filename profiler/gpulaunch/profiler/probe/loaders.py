"""Tracks a program's dataloaders: the line that constructs each, its settings, and its use."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from gpulaunch.profiler.probe.dataset_state import State, state_of, wrapped
from gpulaunch.profiler.probe.facts import set_fact
from gpulaunch.profiler.probe.sites import line_of_user
from gpulaunch.profiler.probe.user_signals import raised_by_program

_MOST_LOADERS: Final = 16
"""Maximum of distinct ones reported: the memory is bounded also if each epoch's loader has other settings."""

_MOST_ALIVE: Final = 256
"""Maximum of loaders known by their sampler or their dataset."""


_MADE: Final = 6
"""Epochs that a line has constructed loaders for, until that is believed of every epoch."""
_OF_EPOCHS: Final = 0.8
"""Loaders that a line has constructed, of its epochs: it may have kept one for a while."""
_OPEN: Final = frozenset(
    {
        *(("_io", "_IOBase"), ("sqlite3", "Connection"), ("h5py", "File"), ("h5py", "Group"), ("zipfile", "ZipFile")),
        *(("tarfile", "TarFile"), ("lmdb", "Environment"), ("socket", "socket"), ("requests", "Session")),
    }
)
"""Types, by package, that processes must not share."""


class Loaders:
    """The dataloaders of this process. Any thread may create one."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, Any]] = {}
        # An iterator does not know its loader, but has its sampler. An id is valid as long as its object lives; a later
        # object with the same id was also made later, and has replaced it here.
        self._by_sampler: dict[int, dict[str, Any]] = {}
        self._by_dataset: dict[int, str] = {}
        self._made = Counter[str]()  # loaders that the program has constructed, by line
        self._epochs = Counter[str]()  # of training, from loaders of a line
        self._states: dict[str, State] = {}  # of the dataset in the epoch before, by line
        self._last: dict[str, Any] | None = None  # the iterator that returned the last batch
        self._doubted: set[str] = set()  # lines whose loaders were used for evaluation with gradients enabled

    def made(self, loader: Any, where: str, *, by_package: bool) -> None:
        """A dataloader was created on this line of the program, by the program itself or by a package that it called.

        Packages (Accelerate, Lightning) rebuild the program's own loader; the line to report is that of the original.
        """
        where = self.line_of(loader.dataset, where, by_package=by_package)
        if not by_package:
            _remember(self._by_dataset, id(loader.dataset), where)
        settings = settings_of(loader) | traits_of(loader.dataset)
        key = f"{where} {settings}"
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MOST_LOADERS:
                return
            kind = self._kinds[key] = {"site": where, "split": None, "made_anew": False, **settings}
            self._tell()
        self._made[where] += 1
        _remember(self._by_sampler, id(getattr(loader, "_index_sampler", None)), kind)

    def line_of(self, dataset: Any, where: str, *, by_package: bool) -> str:
        """The line to report for a dataloader of this dataset that is created on line `where`: see `made`."""
        return self._by_dataset.get(id(dataset), where) if by_package else where

    def used(self, iterator: Any, trains: bool) -> str:
        """This iterator returns its first batch, for training or something else.

        Returns:
            The line that created its dataloader; "" if unknown.
        """
        kind = self._last = self._by_sampler.get(id(iterator._index_sampler))
        if kind is None:
            return ""
        where: str = kind["site"]
        self._epochs[where] += trains
        if trains and "epoch_batches" not in kind:
            kind["epoch_batches"] = _epoch_batches(iterator._index_sampler)
            self._tell()
        if trains and kind["num_workers"] and "changes" not in kind:
            before, now = self._states.get(where), state_of(iterator._dataset)
            if before is not None and now.differs(before):
                kind["changes"] = True
                self._tell()
            self._states[where] = now
        if trains and kind["made_anew"] != (made_anew := self._is_made_anew(where)):
            kind["made_anew"] = made_anew
            self._tell()
        if kind["split"] is None or (trains and where not in self._doubted):
            self._set_split(kind, "train" if trains else "eval")
        return where

    def _is_made_anew(self, where: str) -> bool:
        """Whether a line constructs a loader for each epoch of training."""
        epochs = self._epochs[where]
        return epochs >= _MADE and self._made[where] >= _OF_EPOCHS * epochs

    def fetched(self, tensors: int) -> None:
        """A batch of the last-used loader has this many tensors: workers that it may get would send each of them."""
        kind = self._last
        if kind is not None and not kind["num_workers"] and kind.get("tensors", 1) < tensors:
            kind["tensors"] = tensors
            self._tell()

    def evaluated(self) -> None:
        """The batches of the last-used loader were not used for training, although gradients were enabled."""
        if self._last is not None:
            self._doubted.add(self._last["site"])
            self._set_split(self._last, "eval")

    def _set_split(self, kind: dict[str, Any], split: str) -> None:
        if kind["split"] != split:
            kind["split"] = split
            self._tell()

    def _tell(self) -> None:
        told = None
        # If two threads report at once, the one with older data may be the later: so each checks again afterwards.
        while told != (kinds := [dict(kind) for kind in tuple(self._kinds.values())]):
            set_fact("loaders", kinds)
            told = kinds


def _remember(known: dict[int, Any], identity: int, what: Any) -> None:
    known.pop(identity, None)
    if len(known) >= _MOST_ALIVE:
        with suppress(KeyError, RuntimeError):  # another thread does the same
            known.pop(next(iter(known)))  # the one created first
    known[identity] = what


def settings_of(loader: Any) -> dict[str, Any]:
    """The settings of a dataloader, as JSON values."""
    workers = loader.num_workers
    return {
        "num_workers": workers,
        "prefetch_factor": loader.prefetch_factor,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "in_order": bool(getattr(loader, "in_order", True)),
        "batch_size": _batch_size(loader),
        "kind": "iterable" if loader._dataset_kind == 1 else "map",  # torch's _DatasetKind
        "start_method": _start_method(loader.multiprocessing_context) if workers else None,
    }


def traits_of(dataset: Any) -> dict[str, Any]:
    """What forbids workers, or persistent ones, for a dataset: only what is so is in it.

    `holds`: something open that forked workers would share, such as the position in a file. `changes`: the program
    tells it the epoch, which workers that persist would not hear, or (`Loaders.used`) changes it between epochs.
    """
    traits: dict[str, Any] = {}
    for each, attributes in wrapped(dataset):
        if hasattr(type(each), "set_epoch"):
            traits["changes"] = True
        held = next((kind for value in attributes.values() if (kind := _open_kind(value))), "")
        if held:
            traits.setdefault("holds", held)
    return traits


def _open_kind(value: Any) -> str:
    """The name of the type of an open file, database or connection; "" for anything else. No code of the value runs."""
    if type(value).__name__ in ("BytesIO", "StringIO"):  # in memory: each process has its own
        return ""
    for each in type(value).__mro__:
        if (each.__module__.partition(".")[0], each.__name__) in _OPEN:
            return f"an open {type(value).__name__}"
    return ""


def _batch_size(loader: Any) -> int | None:
    """Samples in a batch; a user's batch sampler may not report it."""
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None)
    return size if type(size) is int else None


def _epoch_batches(sampler: Any) -> int | None:
    """Batches of an epoch; None where a sampler of the program's own draws them: its length may take long, or not be
    true."""
    own = (type(each).__module__ for each in (sampler, getattr(sampler, "sampler", None)))
    if not all(module.startswith("torch.utils.data.") for module in own):
        return None
    try:
        return len(sampler)
    except Exception:  # of the dataset, or of a sampler without an end
        return None


def _start_method(context: Any) -> str:
    """How workers are started. The query must not fix the method: the program may still choose."""
    multiprocessing: Any = sys.modules["multiprocessing"]  # torch has imported it
    chosen = (context or multiprocessing).get_start_method(allow_none=True)
    return str(chosen or multiprocessing.get_all_start_methods()[0])  # the first is this Python's default


def tap_init(torch: Any, loaders: Loaders, failed: Callable[[str], None], original: Any) -> Callable[..., None]:
    """`DataLoader.__init__`, reporting the line of the program that creates one."""
    is_compiling = torch.compiler.is_dynamo_compiling
    works = True

    @functools.wraps(original)
    def tapped_init(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal works
        if is_compiling() or not works:
            original(self, *args, **kwargs)
            return
        original(self, *args, **kwargs)
        try:
            where, by_package = line_of_user()
            loaders.made(self, where, by_package=by_package)
        except Exception as error:
            if raised_by_program(error):
                raise
            works = False
            failed(repr(error))

    # inspect.signature follows `__wrapped__`; inspect.getfullargspec does not, and frameworks use either.
    tapped_init.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return tapped_init
