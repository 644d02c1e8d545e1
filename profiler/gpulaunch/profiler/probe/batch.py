"""Observes a dataloader when a batch is requested and when it is returned: waits, queue, batch sizes.

The cause of a wait of the training thread follows from the queue at the time of the request. If it was empty, the
thread waited for workers, and `probe.worker` knows what delayed them. Otherwise either the wanted batch was ready, and
the time went into its transfer (unpickling, mapping shared memory, pinning), or it waited for an earlier batch, which
another worker was still fetching (`in_order`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from gpulaunch.profiler.channel.layout import SITE_KINDS, STEP_BUCKETS, Hook, Word
from gpulaunch.profiler.channel.quantities import LoaderState
from gpulaunch.profiler.probe.account import bucket_of
from gpulaunch.profiler.probe.loader_queue import (
    NO_PLACES,
    has_out_of_order,
    length_of,
    one_worker_is_late,
    places_of,
    queue_of,
)
from gpulaunch.profiler.probe.loaders import Loaders
from gpulaunch.profiler.probe.padding import Padding
from gpulaunch.profiler.probe.size import size_of, tensors_in
from gpulaunch.profiler.probe.targets import Targets
from gpulaunch.profiler.probe.tensor_memory import without_functions
from gpulaunch.profiler.probe.user_signals import raised_by_program
from gpulaunch.profiler.probe.worker_starts import WorkerStarts

if TYPE_CHECKING:
    from gpulaunch.profiler.channel.segment_writer import SegmentWriter


SHORT_NS: Final = 1_000_000
"""If a batch arrived within this time, it is not checked whether a ready batch was the expected one."""
LATE_NS: Final = 4_000_000
"""If none was ready, and the next one arrived within this time, it is not checked whether only that one is late."""

_ALIKE: Final = 64
_LOOK_EVERY: Final = 8
"""After this many equal batches in a row, one of eight is inspected, and the last one of an epoch."""

_TELL_EVERY_NS: Final = 200_000_000  # readers read a few times a second

# Plain numbers: an enum member lookup takes as long as writing its word.
_BATCHES: Final = LoaderState.batches
_EVAL_BATCHES: Final = LoaderState.eval_batches
_BATCH_BYTES: Final = LoaderState.batch_bytes_total
_WAIT_NS: Final = LoaderState.wait_ns_total
_TRANSFER_NS: Final = LoaderState.transfer_ns_total
_BLOCKED_NS: Final = LoaderState.blocked_ns_total
_EPOCHS: Final = LoaderState.epochs
_FIRST_WAIT_NS: Final = LoaderState.first_wait_ns_total
_RESTARTS: Final = LoaderState.restarts
_SHARED_NS: Final = LoaderState.shared_ns_total
_SHARED_FAULTS: Final = LoaderState.shared_faults
_HISTOGRAM: Final = int(Word.LOADER_WAIT_HISTOGRAM)
_KIND: Final = SITE_KINDS.index("loader")

_NEVER: Final = 1 << 62
_NO_ROW: Final = -1  # the line that created the loader is unknown
_NO_QUEUE: Final = (0, 0, 0, 0, 0)

# The batches that were ready when one was requested.
_NOTHING: Final = 0
_SOME: Final = 1  # the expected one or not
_ALL: Final = 2  # that were requested from workers
BLOCKED: Final = 3


class LoaderWatch:
    """Counts the batches that a rank's loops get from their dataloaders, and the waits for them. Never raises."""

    __slots__ = (
        "_alike",
        "_aside",
        "_batch_bytes",
        "_batches",
        "_blocked_ns",
        "_bucket",
        "_bucket_from",
        "_bucket_to",
        "_counts",
        "_entered",
        "_eval_batches",
        "_last",
        "_length",
        "_looks_closer",
        "_looks_in",
        "_looks_up",
        "_most_queued",
        "_padding",
        "_passed_samples",
        "_places_left",
        "_plain",
        "_plain_ns",
        "_queue_due_ns",
        "_reads_queue",
        "_row",
        "_rows",
        "_shape",
        "_size_bytes",
        "_targets",
        "_tell_due_ns",
        "_told_queue",
        "_transfer_ns",
        "_unavailable",
        "_wait_ns",
        "_words",
        "_writer",
        "before_change",
        "iterator",
        "loaders",
        "look_at",
        "passing",
        "ready_ns",
        "reset_ns",
        "samples",
        "starts",
        "tensor",
    )

    def __init__(self, writer: SegmentWriter, unavailable: Callable[[Hook, str], None], tensor: type[Any]) -> None:
        self.loaders = Loaders()
        self.starts = WorkerStarts()
        self.before_change: Callable[[], None] = lambda: None
        """Called before the properties of plain batches change: noted ones have the old properties."""
        self._writer = writer
        self._words = writer.words
        self._unavailable = unavailable
        self.tensor = tensor
        """torch's Tensor type; any other until torch is imported, since there are no batches before."""
        self._padding = Padding()
        self._targets = Targets()
        self._queue_due_ns = self._tell_due_ns = 0
        self._told_queue = False
        self._most_queued, self._places_left = NO_PLACES
        self._reads_queue = self._looks_in = self._looks_up = self._looks_closer = True
        self.iterator = 0
        """The one that returned the last batch (its `id`)."""
        self._aside = 0  # consecutive batches that another thread than the training thread received
        self._row = _NO_ROW  # where it was created
        self._shape: Any = None  # of the first tensor of the last inspected batch, how many there were, and how many
        self._length = self._alike = 0  # batches were of its size
        self.samples = self._size_bytes = 0
        self.look_at = 0
        """Number, in its epoch, of the next batch that is not a plain one."""
        self._last = 0  # number of the last one
        self._plain = self._plain_ns = 0  # plain batches that are not counted yet; the wait for them
        self.ready_ns = 0
        """Total wait for batches that were ready when requested."""
        self.reset_ns = 0
        """How long the creation of an iterator took to draw its first indices, so far."""
        self.passing = 0
        """Plain batches of unobserved steps that are not counted yet: their wait was not measured."""
        self._passed_samples = 0  # those that are
        self._rows: dict[str, int] = {}

        # totals so far, written to the segment by `_tell`, and the part of them that `flush` has entered at lines
        self._batches = self._eval_batches = self._batch_bytes = 0
        self._wait_ns = self._transfer_ns = self._blocked_ns = 0
        self._counts = [0] * STEP_BUCKETS
        self._bucket = self._bucket_from = self._bucket_to = 0
        self._entered = 0, 0, 0

    def asked(self, iterator: Any, now_ns: int) -> int:
        """A batch is requested.

        Returns:
            The state of the queue, to be passed to `handed`.
        """
        if self.starts.looks:
            self.starts.asked(iterator, now_ns)
        if not self._reads_queue:
            return _NOTHING
        try:
            # A batch is usually ready, and that is enough: reading the whole queue was a fifth of the probe's overhead.
            if now_ns < self._queue_due_ns and id(iterator) == self.iterator:
                queued = self._most_queued - self._places_left()
                if queued > 0:
                    return _ALL if queued >= iterator._tasks_outstanding else _SOME
            if not iterator._num_workers:
                return _NOTHING
            queue = queue_of(iterator)
        except Exception as error:
            if raised_by_program(error):
                raise
            self._reads_queue = False
            self._unavailable(Hook.LOADER_QUEUE, repr(error))
            return _NOTHING
        if now_ns >= self._queue_due_ns:
            self._queue_due_ns = now_ns + _TELL_EVERY_NS
            self._writer.write_queue(queue)
            self._told_queue = True
        _, outstanding, ready, blocked, backlog = queue
        if blocked:
            return BLOCKED
        if ready + backlog >= outstanding > 0:
            return _ALL
        return _SOME if ready or backlog else _NOTHING

    def plain(self, wait_ns: int) -> None:
        """The training thread got a plain batch: of the same size as the last inspected one, with nothing to look up.
        The test for it is inlined in `edges.tap_next`; most batches are plain.

        Args:
            wait_ns: how long the thread waited for it.
        """
        if not self._bucket_from < wait_ns <= self._bucket_to:
            self._count_plain()
            self._bucket, self._bucket_from, self._bucket_to = bucket_of(wait_ns)
        self._plain += 1
        self._plain_ns += wait_ns

    def handed(self, iterator: Any, batch: Any, asked: int, now_ns: int, wait_ns: int, trains: bool) -> int:
        """A batch that is not a plain one is returned.

        Args:
            iterator: the dataloader's.
            batch: the batch.
            asked: the result of `asked`.
            now_ns: the time now.
            wait_ns: how long the training thread was in `next`; -1: it was another thread.
            trains: False when gradients are off.

        Returns:
            The number of samples in the batch; 0 if unknown.
        """
        number = 0
        if wait_ns < 0:
            self.iterator = 0  # the next batch of the training thread is not a plain one
            self._aside += trains
            if self._aside == _ALIKE:
                self._unavailable(
                    Hook.DATALOADER,
                    "a thread of the program prefetches batches, so the wait for data is counted as forward",
                )
        elif self._looks_up:
            self._aside = 0
            try:
                number = iterator._num_yielded
                if number == 1 or id(iterator) != self.iterator:
                    self._turn_to(iterator, trains)
            except Exception as error:
                if raised_by_program(error):
                    raise
                self._looks_up = False
                self._unavailable(Hook.FACTS, repr(error))
        self._count_plain()
        self._batches += 1
        if not trains:
            self._eval_batches += 1
        if number and number < self.look_at:
            samples = self.samples
            self._batch_bytes += self._size_bytes
        else:
            samples = self._look(batch, number)
            if trains and self._looks_closer:
                self._look_closer(batch, number)
        if wait_ns >= 0:
            self._wait_ns += wait_ns
            if number == 1 and trains:
                self.starts.trains(iterator, now_ns, wait_ns)
            elif number == 1:
                self.starts.evaluates(iterator)
            elif self.starts.looks:
                self.starts.arrived(now_ns)
            if self.starts.looks:
                self.look_at = 0
            if not self._bucket_from < wait_ns <= self._bucket_to:
                self._bucket, self._bucket_from, self._bucket_to = bucket_of(wait_ns)
            self._counts[self._bucket] += 1
            if asked:
                # A batch in the queue need not be the expected one: if it was not, it is now out of order.
                if asked == BLOCKED or (asked == _SOME and has_out_of_order(iterator)):
                    self._blocked_ns += wait_ns
                else:
                    self._transfer_ns += wait_ns
            elif wait_ns > LATE_NS and self._reads_queue and one_worker_is_late(iterator, number):
                self._blocked_ns += wait_ns  # nearly all of it: the others have had as long as their batches took
        if now_ns >= self._tell_due_ns:
            self._tell_due_ns = now_ns + _TELL_EVERY_NS
            self._tell()
        return samples

    def flush(self) -> None:
        """Write everything to the segment, and add new counts to the loader's line. For each batch, this would
        take longer than all other work for it."""
        self._tell()
        now = self._batches, self._batch_bytes, self._wait_ns
        (batches, size_bytes, wait_ns), self._entered = self._entered, now
        if self._row != _NO_ROW and now[0] > batches:
            self._writer.site(
                self._row, count=now[0] - batches, size_bytes=now[1] - size_bytes, blocked_ns=now[2] - wait_ns
            )

    def passed(self, iterator: Any, batch: Any, trains: bool) -> int:
        """Count a returned batch only; return its number of samples."""
        self._count_plain()
        self._batches += 1
        if not trains:
            self._eval_batches += 1
        number = getattr(iterator, "_num_yielded", 0) if id(iterator) == self.iterator else 0
        if 0 < number < self.look_at:
            self._batch_bytes += self._size_bytes
            return self.samples
        return self._look(batch, number)

    def passed_samples(self) -> int:
        """The samples in plain batches of unobserved steps since the last call."""
        self._count_plain()
        samples, self._passed_samples = self._passed_samples, 0
        return samples

    def evaluated(self, batches: int, trains: bool) -> None:
        """The last `batches` batches were not used for training; `trains`: others of their dataset are."""
        self._eval_batches += batches
        if not trains:
            self.loaders.evaluated()

    def _tell(self) -> None:
        """Write the counters to the segment."""
        self._count_plain()
        words = self._words
        words[_BATCHES] = self._batches
        words[_EVAL_BATCHES] = self._eval_batches
        words[_BATCH_BYTES] = self._batch_bytes
        words[_WAIT_NS] = self._wait_ns
        words[_TRANSFER_NS] = self._transfer_ns
        words[_BLOCKED_NS] = self._blocked_ns
        starts = self.starts
        words[_EPOCHS] = starts.epochs
        words[_FIRST_WAIT_NS] = starts.first_wait_ns
        words[_RESTARTS] = starts.restarts
        words[_SHARED_NS] = starts.shared_ns
        words[_SHARED_FAULTS] = starts.shared_faults
        for bucket, count in enumerate(self._counts, _HISTOGRAM):
            words[bucket] = count

    def _count_plain(self) -> None:
        """Enter the plain batches."""
        plain, self._plain = self._plain, 0
        self._wait_ns += self._plain_ns
        self._transfer_ns += self.ready_ns
        self._plain_ns = self.ready_ns = 0
        passing, self.passing = self.passing, 0
        self._passed_samples += passing * self.samples
        self._batches += plain + passing
        self._batch_bytes += (plain + passing) * self._size_bytes
        self._counts[self._bucket] += plain

    def _look(self, batch: Any, number: int) -> int:
        """Inspect the batch of this number in its epoch (0: not known), and return when to inspect again."""
        if not self._looks_in:
            self.look_at = _NEVER
            return 0
        try:
            first: Any = batch[0] if type(batch) is list and batch else None
            shape = first.shape if type(first) is self.tensor else None
            if shape is not None and shape == self._shape and len(batch) == self._length:
                self._alike += 1
            else:
                self._shape, self._length = shape, 0 if shape is None else len(batch)
                size = size_of(batch, self.tensor)
                if size == (self.samples, self._size_bytes):
                    self._alike += 1
                else:
                    self._alike = 0
                    self.before_change()
                    self._count_plain()
                    self.samples, self._size_bytes = size
        except Exception as error:  # a user's type may run any code when inspected
            if raised_by_program(error):
                raise
            self._looks_in = False
            self.samples = self._size_bytes = 0
            self._unavailable(Hook.SAMPLES, repr(error))
        self._batch_bytes += self._size_bytes
        self.look_at = min(number + _LOOK_EVERY, self._last) if self._alike >= _ALIKE and self._last else 0
        return self.samples

    def _look_closer(self, batch: Any, number: int) -> None:
        """Inspect what a batch of training, with this number in its epoch, consists of."""
        try:
            if number == 1 and self._looks_in:
                self.loaders.fetched(tensors_in(batch, self.tensor))
            with without_functions():
                self._padding.look(batch, self.tensor)
                self._targets.look(batch, self.tensor)
        except Exception as error:  # a user's type may run any code
            if raised_by_program(error):
                raise
            self._looks_closer = False
            self._unavailable(Hook.FACTS, f"batches: {error!r}")

    def _turn_to(self, iterator: Any, trains: bool) -> None:
        """A different loader is used, or another epoch begins."""
        self.before_change()
        self.flush()
        if trains and self._told_queue and not iterator._num_workers:  # the values so far belong to an evaluation
            self._told_queue = False
            self._writer.write_queue(_NO_QUEUE)
        where = self.loaders.used(iterator, trains)
        row = self._rows.get(where)
        if row is None:
            row = self._rows[where] = self._writer.add_site(_KIND, where) if where else _NO_ROW
        self.iterator, self._row = id(iterator), row
        self._most_queued, self._places_left = places_of(iterator)
        self.look_at, self._last = 0, length_of(iterator)
