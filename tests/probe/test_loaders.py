"""Which dataloaders a program has, with stand-ins for torch's."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.dataset_state import state_of
from gpulaunch.profiler.probe.loaders import Loaders, settings_of, tap_init, traits_of

TORCH = SimpleNamespace(compiler=SimpleNamespace(is_dynamo_compiling=lambda: False))


@pytest.fixture(autouse=True)
def own_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "rank_facts", facts.Facts())


def told() -> list[dict[str, Any]]:
    return facts.rank_facts.known["loaders"]


class Loader:
    """Just enough of a DataLoader."""

    def __init__(self, dataset: object = None, num_workers: int = 0, **more: Any) -> None:
        self.dataset = dataset or object()
        self.num_workers = num_workers
        self.prefetch_factor = 2 if num_workers else None
        self.pin_memory = self.persistent_workers = False
        self.batch_size: int | None = 8
        self.batch_sampler: Any = object()
        self.multiprocessing_context: Any = None
        self._dataset_kind = 0
        vars(self).update(more)

    @property
    def _index_sampler(self) -> Any:
        return self.batch_sampler

    def iterator(self) -> SimpleNamespace:
        return SimpleNamespace(_index_sampler=self._index_sampler, _dataset=self.dataset)


def test_a_loader_is_told_with_its_line_and_its_settings():
    Loaders().made(Loader(num_workers=2), "train.py:4 main", by_package=False)

    assert told() == [
        {
            "site": "train.py:4 main",
            "split": None,
            "made_anew": False,
            "num_workers": 2,
            "prefetch_factor": 2,
            "pin_memory": False,
            "persistent_workers": False,
            "in_order": True,
            "batch_size": 8,
            "kind": "map",
            "start_method": multiprocessing.get_all_start_methods()[0],
        }
    ]


def test_what_it_is_used_for_is_told_when_it_is():
    loaders, loader = Loaders(), Loader()
    loaders.made(loader, "train.py:4 main", by_package=False)
    where = [loaders.used(loader.iterator(), trains=trains) for trains in (False, True, False)]

    assert where == ["train.py:4 main"] * 3
    assert told()[0]["split"] == "train", "what trains once is for training"


class Endless:
    def __len__(self) -> int:
        raise TypeError


@pytest.mark.parametrize(
    ("sampler", "batches"),
    [
        (BatchSampler(RandomSampler(range(100)), 8, drop_last=False), 13),
        (BatchSampler(RandomSampler(Endless(), num_samples=80), 8, drop_last=True), 10),
        (BatchSampler(SequentialSampler(Endless()), 8, drop_last=True), None),
        (BatchSampler([3, 1, 2], 8, drop_last=True), None),
        ([[1, 2], [3]], None),
        (None, None),
    ],
)
def test_the_length_of_an_epoch_is_told_where_samplers_of_torch_know_it(sampler, batches):
    loaders, loader = Loaders(), Loader(batch_sampler=sampler)
    loaders.made(loader, "train.py:4 main", by_package=False)
    loaders.used(loader.iterator(), trains=False)
    assert "epoch_batches" not in told()[0]

    loaders.used(loader.iterator(), trains=True)
    assert told()[0]["epoch_batches"] == batches


def test_a_loader_that_only_evaluates_is_told_so():
    loaders, loader = Loaders(), Loader()
    loaders.made(loader, "train.py:9 test", by_package=False)
    loaders.used(loader.iterator(), trains=False)

    assert told()[0]["split"] == "eval"


@pytest.mark.parametrize(("workers", "known"), [(0, 120), (2, None)])
def test_the_most_tensors_of_a_batch_are_told_of_a_loader_without_workers(workers, known):
    loaders, loader = Loaders(), Loader(num_workers=workers)
    loaders.made(loader, "train.py:4 main", by_package=False)
    loaders.used(loader.iterator(), trains=True)
    for tensors in (1, 120, 90):
        loaders.fetched(tensors)

    assert told()[0].get("tensors") == known


def test_an_iterator_of_an_unknown_loader_has_no_line():
    assert Loaders().used(Loader().iterator(), trains=True) == ""


def test_the_same_line_each_epoch_is_one_loader():
    loaders = Loaders()
    for _ in range(100):
        loaders.made(Loader(num_workers=2), "train.py:4 main", by_package=False)

    assert len(told()) == 1


@pytest.mark.parametrize(("loaders_made", "epochs_of_each", "anew"), [(6, 1, True), (2, 3, False), (6, 3, False)])
def test_a_loader_for_each_epoch_of_training_is_told_as_made_anew(loaders_made, epochs_of_each, anew):
    """Not those of the folds of a cross-validation, each of which has epochs of its own."""
    loaders = Loaders()
    kept = [Loader(num_workers=2) for _ in range(loaders_made)]
    for loader in kept:
        loaders.made(loader, "train.py:4 main", by_package=False)
        loaders.made(loader, "trainer.py:9 fit", by_package=True)
        for _ in range(epochs_of_each):
            loaders.used(loader.iterator(), trains=False)
            loaders.used(loader.iterator(), trains=True)

    assert [loader["made_anew"] for loader in told()] == [anew]


class Ratings:
    """A dataset that the program gives other samples for each epoch."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.size = 100_000

    def draw(self) -> None:
        self.rows = [*self.rows]

    def grow(self) -> None:
        self.rows.append(1)

    def shrink(self) -> None:
        self.size = self.size - 1

    def stay(self) -> None:
        """Nothing changes."""


@pytest.mark.parametrize(("change", "workers"), [("draw", 2), ("grow", 2), ("shrink", 2), ("stay", 2), ("grow", 0)])
def test_a_dataset_that_changes_between_epochs_is_told_if_workers_have_it(change: str, workers: int) -> None:
    """Without any, it may fill a cache of its own meanwhile."""
    loaders, ratings = Loaders(), Ratings()
    loader = Loader(ratings, num_workers=workers)
    loaders.made(loader, "train.py:4 main", by_package=False)
    for _ in range(3):
        getattr(ratings, change)()
        loaders.used(loader.iterator(), trains=True)

    assert told()[0].get("changes") is (True if workers and change != "stay" else None)


def changed_in_place(images: Any) -> None:
    images.labels[3] = 7


def wrapped_changed(images: Any) -> None:
    images.dataset.strength = 0.5


def its_transform_changed(images: Any) -> None:
    images.transform.strength = 0.5


class Has:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        (changed_in_place, torch.zeros(20)),
        (changed_in_place, torch.zeros(20).numpy().copy()),
        (changed_in_place, [0] * 20),
        (wrapped_changed, None),
        (its_transform_changed, None),
    ],
)
def test_what_is_in_a_dataset_may_be_changed(change: Callable[[Any], None], labels: Any) -> None:
    images = Has(labels=labels, dataset=Has(strength=0.1), transform=Has(strength=0.1))
    before = state_of(images)
    assert not state_of(images).differs(before)

    change(images)

    assert state_of(images).differs(before)


def test_a_dataset_without_attributes_may_want_to_know_the_epoch() -> None:
    class Shards:
        __slots__ = ()

        def set_epoch(self, epoch: int) -> None:
            """Other samples each time."""

    assert traits_of(Shards()) == {"changes": True}
    assert not state_of(Shards()).contents


@pytest.mark.parametrize(("value", "differs"), [(0.0, False), (1.0, True)])
def test_a_new_dataset_is_another_one_if_its_contents_are(value: float, *, differs: bool) -> None:
    """A program that makes one for each epoch may keep it if all are the same."""
    first, second = (
        Has(tensors=(torch.full((3, 5), each), torch.arange(3)), names=["a", "b"], paths=[Has(), Has()], scale=each)
        for each in (0.0, value)
    )

    assert state_of(second).differs(state_of(first)) is differs


@pytest.mark.parametrize(
    "value",
    [
        *(torch.zeros(0), torch.zeros(()), torch.zeros(3, 4).t(), torch.zeros(3, dtype=torch.bfloat16)),
        *(torch.zeros(3, requires_grad=True), torch.eye(3).to_sparse(), torch.zeros(3, dtype=torch.cfloat).conj()),
        *(torch.zeros(3, device="meta"), torch.zeros(1 << 23), torch.zeros(3).numpy()[1:], {}, set(), object()),
        torch.zeros(3).numpy().astype(object),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_any_value_is_part_of_a_state(value: object) -> None:
    assert not state_of(Has(value=value)).differs(state_of(Has(value=value)))


def test_a_program_that_sets_up_each_one_differently_is_told_in_part():
    loaders = Loaders()
    kept = [Loader(batch_size=size) for size in range(1000)]
    for loader in kept:
        loaders.made(loader, "train.py:4 main", by_package=False)

    assert [loader["batch_size"] for loader in told()] == list(range(16))
    assert loaders.used(kept[3].iterator(), trains=True) == "train.py:4 main"
    assert loaders.used(kept[999].iterator(), trains=True) == ""


def test_a_package_that_makes_one_from_the_programs_own_is_not_named():
    loaders, dataset = Loaders(), object()
    loaders.made(Loader(dataset), "train.py:4 main", by_package=False)
    made = Loader(dataset, num_workers=2)
    loaders.made(made, "train.py:30 main", by_package=True)
    loaders.made(Loader(object()), "train.py:31 main", by_package=True)

    assert [loader["site"] for loader in told()] == ["train.py:4 main", "train.py:4 main", "train.py:31 main"]
    assert loaders.used(made.iterator(), trains=True) == "train.py:4 main"


@pytest.mark.parametrize(
    ("loader", "setting", "value"),
    [
        (Loader(batch_size=None, batch_sampler=SimpleNamespace(batch_size=16)), "batch_size", 16),
        (Loader(batch_size=None, batch_sampler=SimpleNamespace(batch_size="many")), "batch_size", None),
        (Loader(batch_size=None), "batch_size", None),
        (Loader(_dataset_kind=1), "kind", "iterable"),
        (Loader(in_order=False), "in_order", False),
        (Loader(), "start_method", None),
        (Loader(num_workers=1, multiprocessing_context=multiprocessing.get_context("spawn")), "start_method", "spawn"),
    ],
)
def test_settings(loader, setting, value):
    assert settings_of(loader)[setting] == value


def test_the_users_class_is_made_once_and_its_exceptions_pass():
    calls: list[dict[str, Any]] = []
    failures: list[str] = []

    def init(self: Any, dataset: object, num_workers: int = 0) -> None:
        if num_workers < 0:
            raise ValueError("no such number")
        calls.append({"dataset": dataset, "num_workers": num_workers})
        Loader.__init__(self, dataset, num_workers)

    tapped = tap_init(TORCH, Loaders(), failures.append, init)
    tapped(Loader.__new__(Loader), "data", num_workers=3)
    with pytest.raises(ValueError, match="no such number"):
        tapped(Loader.__new__(Loader), "data", -1)

    assert calls == [{"dataset": "data", "num_workers": 3}]
    assert failures == []
    assert told()[0]["num_workers"] == 3


def test_a_loader_that_cannot_be_asked_ends_the_telling_and_nothing_else():
    failures: list[str] = []
    made: list[Any] = []
    tapped = tap_init(TORCH, Loaders(), failures.append, made.append)
    tapped(object())
    tapped(object())

    assert len(made) == 2
    assert len(failures) == 1
    assert "AttributeError" in failures[0]


def test_an_alarm_that_goes_off_meanwhile_is_the_programs(monkeypatch: pytest.MonkeyPatch):
    failures: list[str] = []

    def rings(*_: object) -> None:
        raise TimeoutError("it takes too long")

    class Slow(Loaders):
        def made(self, *_: Any, **__: Any) -> None:
            signal.raise_signal(signal.SIGALRM)

    tapped = tap_init(TORCH, Slow(), failures.append, lambda self: None)
    before = signal.signal(signal.SIGALRM, rings)
    try:
        with pytest.raises(TimeoutError, match="it takes too long"):
            tapped(object())
    finally:
        signal.signal(signal.SIGALRM, before)

    assert failures == []


def test_many_threads_may_make_loaders_at_once():
    """The telling of one reads what the others add to."""
    loaders = Loaders()
    failures: list[BaseException] = []

    def make() -> None:
        try:
            for size in range(300):
                loaders.made(Loader(batch_size=size), f"train.py:{size}", by_package=False)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)

    assert failures == []
    assert len(told()) == 16
