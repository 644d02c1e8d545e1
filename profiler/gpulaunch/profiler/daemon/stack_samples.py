"""Counts the stack samples of the ranks by the line of the program that they are in, for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpulaunch.profiler.analysis.tally import RankLoop, Tally
from gpulaunch.profiler.record import RankPlace
from gpulaunch.profiler.record.line_calls import (
    ADAM,
    ANOMALY,
    COMPRESSES,
    CONVERTS_LISTS,
    DECOMPOSES,
    DRAWS_ORDER,
    ELEMENTS,
    FORWARD_AGAIN,
    NORM_STATISTICS,
    OBSERVES,
    ONE_HOT,
    ONE_HOT_PRODUCT,
    PARAMETRIZED,
)
from gpulaunch.profiler.samplers.averaged_models import caller_of_update
from gpulaunch.profiler.samplers.gil import computes, waits_for_thread
from gpulaunch.profiler.samplers.logged import line_that_logs
from gpulaunch.profiler.samplers.loss_scores import in_cross_entropy
from gpulaunch.profiler.samplers.parametrized import lines_using_parametrized
from gpulaunch.profiler.samplers.paths import shown_path, working_directory
from gpulaunch.profiler.samplers.recomputed import recomputed
from gpulaunch.profiler.samplers.sampled_calls import (
    Call,
    around_backward,
    below_fetch,
    call_of,
    converting_lists,
    draws_order,
    function_of_thread,
    in_callback,
    in_compiled,
    in_hook_of_module,
    in_linear_layer,
    in_sampler,
    in_save,
    is_outside_compute,
    lines_of_program,
    loops_may_be_in,
    of_metrics,
    spans_steps,
    trains_elsewhere,
    undecorated,
    waits_for_lock,
)
from gpulaunch.profiler.samplers.source_lines import SourceLines
from gpulaunch.profiler.stack import Frame

_LOCKS: Final = frozenset({"fcntl.flock", "fcntl.lockf"})
"""Functions in C that wait for a lock."""
_BETWEEN: Final = ("other", "unsettled")
"""Phases in which no part of the model is known to run."""
_ANYWHERE: Final = (*_BETWEEN, "comm", "h2d", "sync", "gc")
"""Those of steps and of the validation."""
_AROUND_MODEL: Final = (*_BETWEEN, "forward")
"""Those, and all from a batch to backward: what prepares the batch, the model, the loss."""


class StackSamples:
    """Finds of each sample the call that it is in. Any thread may add, but one at a time."""

    def __init__(self, root: Path) -> None:
        self.tally = Tally()
        self._root = str(root)
        self._sources = SourceLines()
        self._validating: dict[int, bool] = {}  # rank -> whether its last phase that is known was validation

    def add(
        self,
        place: RankPlace,
        phase: str,
        frames: Sequence[Frame],
        holds_gil: bool | None = None,
        gil_holder: Sequence[Frame] = (),
    ) -> None:
        """Take a sample of a rank's main thread.

        Args:
            place: the rank.
            phase: of `samplers.phases`.
            frames: the deepest first.
            holds_gil: whether the thread held the GIL; None: not known.
            gil_holder: the frames of the thread that holds it while this one waits for it, the deepest first.
        """
        frames = undecorated(frames)
        if phase not in _ANYWHERE:
            self._validating[place.rank] = phase == "validation"
        if phase == "data_wait":  # without workers, the training thread fetches
            self.add_worker(place, frames)
        if trains_elsewhere(phase, frames):
            self.tally.trains_elsewhere(place.rank)
        innermost = call_of(frames)
        if innermost is not None and phase == "backward":
            self.tally.add_backward(place.rank, self._shown(place, innermost.file, innermost.line))
            self._add_loops_of_steps(place, frames)
        if innermost is not None and phase in _AROUND_MODEL:
            self._add_scores(place, innermost, frames)
        if innermost is not None and self._sources.is_chained(innermost.file, innermost.line):
            self.tally.add_chained(self._shown(place, innermost.file, innermost.line))
        if self._waits_for_gil(place, phase, frames, gil_holder):
            self.tally.add(place.rank, phase)  # nothing on its own stack is why it waits
            return
        if logs := line_that_logs(frames[::-1]):
            self.tally.add(place.rank, phase, logs=self._shown(place, logs.file, logs.line))
            return
        is_metric = innermost is not None and self._validating.get(place.rank, False) and of_metrics(innermost.name)
        call, after_step = self._updates_early(frames) or self._recomputed(innermost, phase, frames), None
        if call is None and innermost is not None and not is_metric:
            after_step = self._after_step(innermost, frames) if phase in _BETWEEN else None
            call = self._outside_compute(innermost, phase, frames, after_step and after_step[0])
        if call is None and not is_metric:
            call = self._in_vain(phase, frames)
        saves = call is None and phase in _BETWEEN and in_save(frames)
        in_python = not saves and self._is_in_python(place, innermost, call, phase, frames, holds_gil)
        if call is None:
            self.tally.add(place.rank, phase, saves=saves)
            if not saves and not in_python:
                self._add_loops(place, phase, frames)
        else:
            at = self._shown(place, call.file, call.line)
            self.tally.add(
                place.rank,
                phase,
                at=at,
                calls=call.name,
                after_step=after_step[1] if after_step else "",
                spans_steps=spans_steps(call, phase),
            )

    def add_worker(self, place: RankPlace, frames: Sequence[Frame]) -> None:
        """Take a sample of what may fetch a batch for a rank, the deepest frame first; outside of that, none counts."""
        if (fetch := below_fetch(frames)) is None:
            return
        lines = lines_of_program(fetch)
        if (inner := call_of(fetch)) is not None:
            in_c = self._sources.call(inner.file, inner.line)
            lines[-1] = replace(lines[-1], name=inner.name or in_c)
            is_locked = waits_for_lock(fetch) or in_c in _LOCKS
        elif (frame := converting_lists(fetch, self._sources.call)) is not None:
            lines, is_locked = [Call(frame.file, frame.line, CONVERTS_LISTS)], False
        else:
            is_locked = False
        calls = {
            self._shown(place, line.file, line.line): self._sources.drops(line.file, line.line) or line.name
            for line in lines
        }
        self.tally.add_fetch(place.rank, calls, is_locked=is_locked)

    def _waits_for_gil(
        self, place: RankPlace, phase: str, frames: Sequence[Frame], gil_holder: Sequence[Frame]
    ) -> bool:
        """Count a sample that waits for another thread; return whether that is one which computes, and has the GIL."""
        if not computes(phase, frames):
            return False
        if waits_for_thread(frames):
            self.tally.gil.add_thread_wait(place.rank)
            return False
        function = function_of_thread(gil_holder)
        if function is None:
            return False
        file, name = function
        lines = lines_of_program(gil_holder)
        if lines and (inner := call_of(gil_holder)) is not None:
            lines[-1] = replace(lines[-1], name=inner.name or self._sources.call(inner.file, inner.line))
        calls = {self._shown(place, line.file, line.line): line.name for line in lines}
        self.tally.gil.add(place.rank, f"{self._path(place, file)} {name}" if file else name, calls)
        return True

    def _recomputed(self, innermost: Call | None, phase: str, frames: Sequence[Frame]) -> Call | None:
        """Return what an activation checkpoint computes again, unless its line is one that is told of by itself."""
        again = recomputed(frames)
        if again and innermost and (innermost.name == ANOMALY or is_outside_compute(innermost, phase)):
            return None
        return again

    def _outside_compute(self, call: Call, phase: str, frames: Sequence[Frame], after_step: Call | None) -> Call | None:
        """Return the call outside of the model's compute that a stack is in; None if there is none.

        Args:
            call: the program's innermost line, and what it calls.
            phase: of the sample.
            frames: all of the stack, the deepest first.
            after_step: see `_after_step`; what works on tensors may be a part of the loss, unless it is in this.
        """
        if call.name == ANOMALY:
            return self._at_its_cause(call, frames)
        if call.origin == "python" and self._sources.is_excused(call.file, call.line):
            return None
        if spans_steps(call, phase) or is_outside_compute(call, phase):
            return call
        if phase == "data_wait" and in_sampler(frames):
            return call
        if phase in (*_AROUND_MODEL, "data_wait") and draws_order(frames):  # some is drawn before the wait begins
            return replace(call, name=DRAWS_ORDER)
        if phase not in _AROUND_MODEL:
            return None
        if call.origin == "program" and not call.in_model:
            name = self._sources.call(call.file, call.line)
            if name and (phase in _BETWEEN or self._sources.calls_no_package(call.file, call.line)):
                return replace(call, name=name)
            if self._sources.is_excused(call.file, call.line):
                return None
        return after_step

    def _after_step(self, call: Call, frames: Sequence[Frame]) -> tuple[Call, str] | None:
        """Return the line of the program's loop after `backward` that a stack is in, or that of a method of a callback,
        and what is the same for all that belongs to it; None: there is none.

        Args:
            call: the program's innermost line, and what it calls.
            frames: all of the stack, the deepest first.
        """
        for line in lines_of_program(frames):
            is_innermost = (line.file, line.line, call.name) == (call.file, call.line, "")
            may_wait = is_innermost or call.origin == "torch" or call.in_model
            if self._sources.is_after_backward(line.file, line.line, may_wait=may_wait):
                return line, f"{line.file}:{line.line}"
        return in_callback(frames)

    def _in_vain(self, phase: str, frames: Sequence[Frame]) -> Call | None:
        """Return the line of a sample that computes with tensors what need not be; None: there is none."""
        if phase == "backward":
            return self._compresses(frames)
        if phase not in (*_AROUND_MODEL, "optimizer"):
            return None
        lines = lines_of_program(frames)
        if lines and (loop := self._sources.line_in_vain(ADAM, lines[-1].file, lines[-1].line)):
            return replace(lines[-1], line=loop, name=ADAM)
        if phase == "optimizer":
            decomposes = lines and self._sources.line_in_vain(DECOMPOSES, lines[-1].file, lines[-1].line)
            return replace(lines[-1], name=DECOMPOSES) if decomposes else None
        users = lines_using_parametrized(frames)
        if any(self._sources.has_the_same_modules(each.file, each.line) for each in users):
            return replace(users[-1], name=PARAMETRIZED)
        for line, within in zip(lines, [*lines[1:], None], strict=False):
            place_within = None if within is None else (within.file, within.line)
            if found := self._sources.repeated(line.file, line.line, place_within):
                told, name = found
                return replace(line, line=told, name=name)
        if not lines:
            return None
        if any(self._sources.line_in_vain(FORWARD_AGAIN, line.file, line.line) for line in lines):
            for frame, calls_module in loops_may_be_in(frames):
                if calls_module and self._sources.line_in_vain(FORWARD_AGAIN, frame.file, frame.line):
                    return Call(frame.file, frame.line, FORWARD_AGAIN)
        hook = in_hook_of_module(frames)
        if hook is not None and self._sources.line_in_vain(OBSERVES, hook.file, hook.line):
            return replace(hook, name=OBSERVES)
        inner = lines[-1]
        if name := self._sources.idiom(inner.file, inner.line):
            return replace(inner, name=name)
        calls_nothing = (inner.file, inner.line) == (frames[0].file, frames[0].line)
        if self._sources.makes_one_hot(inner.file, inner.line) and in_linear_layer(frames):
            return replace(inner, name=ONE_HOT if calls_nothing else ONE_HOT_PRODUCT)
        if calls_nothing and (loop := self._sources.line_in_vain(ELEMENTS, inner.file, inner.line)):
            return replace(inner, line=loop, name=ELEMENTS)
        return None

    def _compresses(self, frames: Sequence[Frame]) -> Call | None:
        """Return the line that registers the communication hook that a sample is in; None: it is in none."""
        for line in lines_of_program(frames):
            if registers := self._sources.line_in_vain(COMPRESSES, line.file, line.line):
                return replace(line, line=registers, name=COMPRESSES)
        return None

    def _updates_early(self, frames: Sequence[Frame]) -> Call | None:
        """Return the line that computes the statistics of an average too often; None: the sample is in none."""
        caller = caller_of_update(frames)
        if caller is None or not self._sources.line_in_vain(NORM_STATISTICS, caller.file, caller.line):
            return None
        return Call(caller.file, caller.line, NORM_STATISTICS)

    def _is_in_python(
        self,
        place: RankPlace,
        innermost: Call | None,
        call: Call | None,
        phase: str,
        frames: Sequence[Frame],
        holds_gil: bool | None,
    ) -> bool:
        """Count whether a sample holds the GIL; return whether its line, outside of the model, always does so far.

        No stack shows what is written in C. But torch releases the GIL for each of its operations, so a line that
        always holds it has none of them. Operations of other packages may keep it.
        """
        if holds_gil is None or innermost is None or innermost.in_model:
            return False
        file, line = frames[0].file, frames[0].line
        if phase not in _AROUND_MODEL or (file, line) != (innermost.file, innermost.line):
            return False
        if call is not None and call.name and (call.file, call.line) == (file, line):
            return False  # it is known what it calls
        if not self._sources.calls_no_package(file, line) or in_compiled(frames):
            return False
        instead = "" if call is None else self._shown(place, call.file, call.line)
        return self.tally.add_innermost(
            place.rank, self._shown(place, file, line), holds_gil=holds_gil, instead=instead
        )

    def _add_scores(self, place: RankPlace, innermost: Call, frames: Sequence[Frame]) -> None:
        """Count the line that gives the scores of a loss, where a sample is in the loss or on the line itself."""
        is_loss = in_cross_entropy(innermost, frames)
        line = self._sources.scores_line(innermost.file, innermost.line) if is_loss else innermost.line
        gives_scores = is_loss or self._sources.gives_scores(innermost.file, line)
        at = self._shown(place, innermost.file, line)
        self.tally.add_scores(place.rank, at, is_loss=is_loss, gives_scores=gives_scores)

    def _add_loops(self, place: RankPlace, phase: str, frames: Sequence[Frame]) -> None:
        """Count the loops of the program that a sample of a step is in, by their first lines."""
        inside: list[RankLoop] = []
        layers: list[RankLoop] = []
        for frame, calls_module in loops_may_be_in(frames):
            loops = layers if calls_module else inside
            loops += reversed(self._loops_at(place, frame))
        self.tally.add_loops(phase, inside, layers)

    def _add_loops_of_steps(self, place: RankPlace, frames: Sequence[Frame]) -> None:
        for frame in around_backward(frames):
            self.tally.add_loops_of_steps(self._loops_at(place, frame))

    def _loops_at(self, place: RankPlace, frame: Frame) -> list[RankLoop]:
        loops = self._sources.loops(frame.file, frame.line)
        return [(place.rank, self._shown(place, frame.file, lines.start), lines.stop - 1) for lines in loops]

    def _at_its_cause(self, call: Call, frames: Sequence[Frame]) -> Call:
        """Anomaly mode costs at every line of the model: the one that switches it on is meant, if it is known."""
        for line in lines_of_program(frames):
            if cause := self._sources.anomaly_line(line.file):
                return replace(call, file=line.file, line=cause)
        return call

    def _shown(self, place: RankPlace, file: str, line: int) -> str:
        return f"{self._path(place, file)}:{line}"

    def _path(self, place: RankPlace, file: str) -> str:
        return shown_path(file, working_directory(place.pid, root=self._root))
