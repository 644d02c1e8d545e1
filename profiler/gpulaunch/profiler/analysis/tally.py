"""Counts stack samples: how many there are, and which lines of the program hold them.

One thread adds, any other may read the counts; memory is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from gpulaunch.profiler.analysis.gil_waits import GilWaits, HolderLine
from gpulaunch.profiler.analysis.line_counts import MOST_LINES, LineCounts, RankLine, count_up_to
from gpulaunch.profiler.record.line_calls import AT_ALL_STEPS

_MOST_LOGGING: Final = 64
_ELSEWHERE: Final = 3
"""Samples that show another thread training before this is believed."""
_BEFORE_BACKWARD: Final = ("forward", "other", "unsettled")
"""Phases in which what backward goes through is computed. With a dataloader only "forward" is, and the others are after
backward; without one there is no "forward"."""
_FORWARD: Final = 0.1
"""Of the samples in these, those in "forward" of a rank with a dataloader; fewer are stacks that were misread."""
_STEPS: Final = 2
"""Samples that show a backward pass in a loop before this is believed."""
_LAYERS: Final = 0.2
"""Of the samples in a loop, those in modules that it calls: with more, it goes through layers or steps of time."""
_WITH_GIL: Final = 24
"""Samples of a line before it is believed that it always holds the GIL."""
_WITHOUT_GIL: Final = 0.01
"""Of the samples of such a line, about so many may be without the GIL, as another thread may have taken it: one of 51.
Operations with tensors hold it in 0.03 to 0.6 of theirs, `item` in 0.8, a view of a row in 0.93, and Python in all
(torch 2.13, 350 samples each)."""
_MOST_INNERMOST: Final = 4096

InnerLine = tuple[int, str, str]
"""A rank, the innermost line of a sample, and the line that the sample counts for otherwise; empty: none."""


RankLoop = tuple[int, str, int]
"""A rank, the first line of a loop of its program as text, and the number of its last one."""
_Counted = tuple[RankLoop, bool]
"""A loop, and whether the samples are in the phase forward."""


class Tally:
    """Counts the samples of training threads and of dataloader workers."""

    def __init__(self) -> None:
        self._samples = Counter[int]()
        self._logged = Counter[RankLine]()
        self._calling = LineCounts()
        self._after_step: dict[RankLine, str] = {}
        self._backward = Counter[RankLine]()
        self._losses = Counter[RankLine]()
        self._around_model = Counter[RankLine]()
        self._before_backward = Counter[tuple[int, bool]]()
        self._looping = Counter[_Counted]()
        self._layered = Counter[_Counted]()
        self._stepping = Counter[RankLoop]()
        self._indexing = Counter[int]()
        self._saving = Counter[int]()
        self._chained = set[str]()
        self._spanning: set[RankLine] = set()
        self._at_all_steps = LineCounts()
        self._elsewhere = Counter[int]()
        self._fetches = Counter[int]()
        self._locked = Counter[int]()
        self._fetching = LineCounts()
        self._innermost = Counter[InnerLine]()
        self._of_gil = Counter[RankLine]()
        self._without_gil = Counter[RankLine]()
        self.gil = GilWaits()

    def add(
        self,
        rank: int,
        phase: str,
        *,
        logs: str = "",
        at: str = "",
        calls: str = "",
        after_step: str = "",
        spans_steps: bool = False,
        saves: bool = False,
    ) -> None:
        """Count a sample of a rank's main thread.

        Args:
            rank: the rank.
            phase: of `samplers.phases`.
            logs: `path:line` of the call into logging; empty: the thread was not inside logging.
            at: `path:line` of a call outside of the model's compute; empty: there is none.
            calls: the function that the line calls; empty: it is not known.
            after_step: what the line is a part of that the program, or a callback, runs after a step; empty: nothing.
            spans_steps: that call contains the training loop, so it is none of a step.
            saves: the thread is in a function that saves checkpoints, outside of the phase that is measured, and in no
                line above.
        """
        if phase == "startup":  # before the first step, part of none
            return
        self._samples[rank] += 1
        self._before_backward[rank, phase == "forward"] += phase in _BEFORE_BACKWARD
        self._saving[rank] += saves
        if logs and phase != "data_wait":  # a progress bar around a loader waits for data, and logs nothing
            count_up_to(self._logged, (rank, logs), _MOST_LOGGING)
        elif at and spans_steps:
            if len(self._spanning) < MOST_LINES:
                self._spanning.add((rank, at))
        elif at:
            self._calling.add((rank, at), calls)
            if after_step and len(self._after_step) < MOST_LINES:
                self._after_step[rank, at] = after_step
            if calls in AT_ALL_STEPS:
                self._at_all_steps.add((rank, at), calls)
            self._indexing[rank] += phase == "data_wait"

    def add_scores(self, rank: int, at: str, *, is_loss: bool, gives_scores: bool) -> None:
        """Count a sample around the model: the line, as `path:line`, that gives the scores of which it computes the
        cross-entropy (`is_loss`); or the program's innermost line, and whether it is known to give some."""
        if is_loss:
            count_up_to(self._losses, (rank, at), MOST_LINES)
        else:
            count_up_to(self._around_model, (rank, at), MOST_LINES)
        if gives_scores and len(self._losses) < MOST_LINES:
            self._losses.setdefault((rank, at), 0)

    def add_backward(self, rank: int, at: str) -> None:
        """Count the program's innermost line, as `path:line`, of a sample in the phase backward."""
        count_up_to(self._backward, (rank, at), MOST_LINES)

    def add_chained(self, at: str) -> None:
        """Take note of a line, as `path:line`, of collectives that need each other's results."""
        if len(self._chained) < MOST_LINES:
            self._chained.add(at)

    def add_loops(self, phase: str, inside: Sequence[RankLoop], layers: Sequence[RankLoop]) -> None:
        """Count a sample of a step for the loops that it is in, of those that one operation could replace.

        Args:
            phase: of `samplers.phases`.
            inside: the innermost first; it counts for the outermost that makes no steps.
            layers: those further out, which call a module of the model that it is in.
        """
        if phase not in _BEFORE_BACKWARD:
            return
        is_forward = phase == "forward"
        for loop in reversed(inside):
            if self._stepping[loop] < _STEPS:
                count_up_to(self._looping, (loop, is_forward), MOST_LINES)
                break
        for loop in set(layers):
            count_up_to(self._layered, (loop, is_forward), MOST_LINES)

    def add_loops_of_steps(self, loops: Sequence[RankLoop]) -> None:
        """Count a sample for the loops around a backward pass: each of their turns makes a step, or a part of one."""
        for loop in set(loops):
            count_up_to(self._stepping, loop, MOST_LINES)

    def trains_elsewhere(self, rank: int) -> None:
        """Count a sample that shows another thread than the main one training in this rank: then the lines of its main
        thread hold no steps. A single one may be a stack that was misread."""
        self._elsewhere[rank] += 1

    def add_innermost(self, rank: int, at: str, *, holds_gil: bool, instead: str) -> bool:
        """Count a sample whose innermost line calls nothing written in Python.

        Args:
            rank: the rank.
            at: the line, as `path:line`.
            holds_gil: whether its thread held the GIL.
            instead: the line that the sample counts for otherwise; empty: none.

        Returns:
            Whether nearly all samples of the line did, so far.
        """
        line = rank, at
        if not count_up_to(self._innermost, (rank, at, instead), _MOST_INNERMOST):
            return False
        self._of_gil[line] += 1
        self._without_gil[line] += not holds_gil
        return self._always_holds_gil(line)

    def _always_holds_gil(self, line: RankLine) -> bool:
        samples = self._of_gil[line]
        return samples >= _WITH_GIL and self._without_gil[line] <= round(_WITHOUT_GIL * samples)

    @property
    def innermost(self) -> Mapping[InnerLine, int]:
        """Samples whose innermost line calls nothing written in Python; they are in `calling`, too, if they count for
        another line."""
        return dict(self._innermost)

    @property
    def holding_gil(self) -> frozenset[RankLine]:
        """The lines of these that always hold the GIL: they compute with no tensor, as torch releases it for each
        operation."""
        return frozenset(line for line in dict(self._of_gil) if self._always_holds_gil(line))

    def add_fetch(self, rank: int, lines: Mapping[str, str], *, is_locked: bool = False) -> None:
        """Count a sample of a worker of a rank inside a fetch.

        Args:
            rank: the rank.
            lines: `path:line` of the program's dataset or collate function and of what they call, the outermost first,
                and the function that each calls; "" where it is not known.
            is_locked: the worker waits for a lock that several processes share.
        """
        self._fetches[rank] += 1
        self._locked[rank] += is_locked
        for at, calls in lines.items():
            self._fetching.add((rank, at), calls)

    @property
    def samples(self) -> Mapping[int, int]:
        """All samples of main threads so far, by rank."""
        return dict(self._samples)

    @property
    def logged(self) -> Mapping[RankLine, int]:
        """Those inside logging, by rank and the program's line."""
        return dict(self._logged)

    @property
    def calling(self) -> Mapping[RankLine, int]:
        """Those in other calls outside of the model's compute, by rank and the program's line."""
        elsewhere = self._trains_elsewhere()
        counts = {line: count for line, count in self._calling.counts.items() if line not in self._spanning}
        counts |= {line: count for line, count in self._at_all_steps.counts.items() if line in self._spanning}
        return {line: count for line, count in counts.items() if line[0] not in elsewhere}

    @property
    def after_step(self) -> Mapping[RankLine, str]:
        """What these lines are a part of that runs after a step, where they are of one."""
        return dict(self._after_step)

    def _trains_elsewhere(self) -> set[int]:
        return {rank for rank, samples in self._elsewhere.items() if samples >= _ELSEWHERE}

    @property
    def before_backward(self) -> Mapping[int, int]:
        """Those in the forward pass and the loss, by rank; without a dataloader, those outside of all phases that are
        known."""
        counts = self._before_backward
        return {rank: sum(counts[rank, each] for each in self._in_forward(rank)) for rank in dict(self._samples)}

    def _in_forward(self, rank: int) -> tuple[bool, ...]:
        """Of which samples those of a rank count: whether they are in the phase forward."""
        forward, others = self._before_backward[rank, True], self._before_backward[rank, False]
        return (True,) if forward > _FORWARD * (forward + others) else (True, False)

    @property
    def looping(self) -> Mapping[RankLine, int]:
        """Those of these in a loop inside a step that computes by itself, by rank and the loop's first line."""
        counts = Counter[RankLine]()
        for (rank, at, _), count in self._loops():
            counts[rank, at] += count  # several may begin on one line
        return {loop: count for loop, count in counts.items() if count}

    @property
    def loop_ends(self) -> Mapping[RankLine, int]:
        """The numbers of the last lines of these loops."""
        return {(rank, at): last for (rank, at, last), _ in sorted(self._loops())}

    def _loops(self) -> list[tuple[RankLoop, int]]:
        elsewhere = self._trains_elsewhere()
        found: list[tuple[RankLoop, int]] = []
        for loop in {loop for loop, _ in dict(self._looping)}:
            phases = self._in_forward(loop[0])
            count, layered = (sum(of[loop, each] for each in phases) for of in (self._looping, self._layered))
            if self._stepping[loop] < _STEPS and loop[0] not in elsewhere and layered <= _LAYERS * (count + layered):
                found.append((loop, count))
        return found

    @property
    def backward(self) -> Mapping[RankLine, int]:
        """Those in the phase backward, by rank and the program's innermost line."""
        return dict(self._backward)

    @property
    def losses(self) -> Mapping[RankLine, int]:
        """Those of a cross-entropy that the program computes by itself, by rank and the line that gives its scores."""
        return dict(self._losses)

    @property
    def around_model(self) -> Mapping[RankLine, int]:
        """Those between the batch and backward, and between two steps, by rank and the program's innermost line."""
        return dict(self._around_model)

    @property
    def indexing(self) -> Mapping[int, int]:
        """Those of them in the phase data_wait, by rank: a sampler of the program draws the indices of a batch."""
        return dict(self._indexing)

    @property
    def saving(self) -> Mapping[int, int]:
        """Those that save a checkpoint outside of the phase that is measured, by rank."""
        return dict(self._saving)

    @property
    def chained(self) -> frozenset[str]:
        """Lines of collectives that need each other's results."""
        return frozenset(self._chained)

    @property
    def gil_waits(self) -> Mapping[HolderLine, int]:
        """Those that wait for the GIL, which another thread holds; see `GilWaits.counts`."""
        elsewhere = self._trains_elsewhere()
        return {line: count for line, count in self.gil.counts.items() if line[0] not in elsewhere}

    @property
    def thread_waits(self) -> Mapping[int, int]:
        """Those that wait for another thread or process by themselves, as in `queue.get`, by rank."""
        return self.gil.thread_waits

    @property
    def fetches(self) -> Mapping[int, int]:
        """All samples of workers inside fetches, by rank."""
        return dict(self._fetches)

    @property
    def locked(self) -> Mapping[int, int]:
        """Those in a lock that several processes share, by rank."""
        return dict(self._locked)

    @property
    def fetching(self) -> Mapping[RankLine, int]:
        """Those in a line of the program, by rank and line."""
        return self._fetching.counts

    @property
    def calls(self) -> Mapping[RankLine, str]:
        """The function that each line mostly calls; empty: it is not known."""
        at_all_steps = {line: calls for line, calls in self._at_all_steps.calls.items() if line in self._spanning}
        return {**self.gil.calls, **self._calling.calls, **at_all_steps, **self._fetching.calls}
