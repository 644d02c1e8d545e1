"""Reads in the source of a program what a line calls, where a stack does not show it: functions written in C.

Only names count: nothing is imported or run. A file that cannot be read or parsed gives nothing.
"""

from __future__ import annotations

import ast
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from gpulaunch.profiler.files import regular
from gpulaunch.profiler.record.line_calls import (
    ADAM,
    COMPRESSES,
    CONSTANT,
    DECOMPOSES,
    ELEMENTS,
    FORWARD_AGAIN,
    NORM_STATISTICS,
    OBSERVES,
    SAME_IN_LAYERS,
)
from gpulaunch.profiler.samplers.adam_by_hand import lines_of_adam
from gpulaunch.profiler.samplers.after_backward import functions_that_step, lines_after_backward, makes_step
from gpulaunch.profiler.samplers.averaged_models import lines_of_updates
from gpulaunch.profiler.samplers.called_names import called_name, generators_of
from gpulaunch.profiler.samplers.chained_collectives import lines_of_chained
from gpulaunch.profiler.samplers.compressed_gradients import lines_of_compression
from gpulaunch.profiler.samplers.constants import constants_of, constants_of_layers
from gpulaunch.profiler.samplers.dropped_samples import lines_of_dropped_samples
from gpulaunch.profiler.samplers.element_loops import loops_over_elements
from gpulaunch.profiler.samplers.loops import calls_in, imported_names, last_name, lines_of, loops_of, method_name
from gpulaunch.profiler.samplers.loss_scores import lines_of_scores
from gpulaunch.profiler.samplers.matrix_decompositions import lines_of_decompositions
from gpulaunch.profiler.samplers.observers import observers_of
from gpulaunch.profiler.samplers.parametrized import loops_with_the_same_modules
from gpulaunch.profiler.samplers.repeated_passes import passes_for_metrics
from gpulaunch.profiler.samplers.repeated_work import lines_of_repeated_work
from gpulaunch.profiler.samplers.statement_calls import (
    EXCUSED,
    TENSOR,
    is_foreign,
    is_off,
    makes_one_hot,
    makes_tensors,
    on_host_only,
    only_call,
    trained_copies,
)
from gpulaunch.profiler.samplers.syntax import forget_nodes, nodes_of
from gpulaunch.profiler.samplers.tensor_idioms import idioms_of

_MOST_BYTES: Final = 1 << 17
"""Of a file; the tree of such a one takes about 15 MB for a moment."""
_MOST_FILES: Final = 64
_MOST_NAME: Final = 60
_ON_THE_HOST: Final = frozenset(
    {
        *("encode_batch", "encode_plus", "batch_encode_plus", "batch_decode", "tokenize"),
        *("execute", "executemany", "fetchall", "fetchone", "fetchmany", "commit", "writerow", "writerows"),
    }
)
"""Methods of objects, of tokenizers, databases and files, that no model has."""
_WAITS: Final = frozenset({"item", "to"})
"""Methods that wait for the GPU, often of an argument of a call that takes time itself: `log(loss.item())`."""
_NOT_TOLD: Final = frozenset(
    {"torch", "torchvision", "__future__", "gc", "time", "math", "operator", "functools", "itertools", "sys"}
)
"""Modules whose functions are torch's own compute or take no time of their own."""
_ANOMALY: Final = frozenset({"set_detect_anomaly", "detect_anomaly"})
_IN_VAIN: Final[dict[str, Callable[[ast.Module], dict[int, int] | set[int]]]] = {
    ADAM: lines_of_adam,
    COMPRESSES: lines_of_compression,
    DECOMPOSES: lines_of_decompositions,
    ELEMENTS: loops_over_elements,
    FORWARD_AGAIN: passes_for_metrics,
    NORM_STATISTICS: lines_of_updates,
    OBSERVES: observers_of,
}
"""What finds the lines that do something in vain: they alone, or each with the line to tell."""
T = TypeVar("T")


@dataclass
class _Source:
    """What is known of the lines of one file."""

    calls: dict[int, str] = field(default_factory=dict[int, str])
    after_backward: set[int] = field(default_factory=set[int])
    waits: set[int] = field(default_factory=set[int])
    excused: set[int] = field(default_factory=set[int])
    foreign: set[int] = field(default_factory=set[int])
    is_read: bool = False
    loops: dict[int, tuple[range, ...]] = field(default_factory=dict[int, tuple[range, ...]])
    one_hot: set[int] = field(default_factory=set[int])
    in_vain: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    idioms: dict[int, str] = field(default_factory=dict[int, str])
    constants: dict[int, list[range]] = field(default_factory=dict[int, list[range]])
    of_layers: dict[int, list[range]] = field(default_factory=dict[int, list[range]])
    repeated: dict[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    dropping: dict[int, str] = field(default_factory=dict[int, str])
    chained: set[int] = field(default_factory=set[int])
    same_modules: set[int] = field(default_factory=set[int])
    scores: dict[int, int] = field(default_factory=dict[int, int])
    of_cross_entropy: set[int] = field(default_factory=set[int])
    detects_anomaly: int = 0

    def name(self, node: ast.Call | ast.stmt, function: str) -> None:
        """Take a function as what the lines of a node call, where nothing else is known of them."""
        for line in lines_of(node):
            self.calls.setdefault(line, function)


class SourceLines:
    """Reads each file once, and at most some tens of them."""

    def __init__(self) -> None:
        self._known: dict[str, _Source] = {}
        self._began_s = time.time()

    def call(self, file: str, line: int) -> str:
        """Return the function in C that a line calls: of an imported module, of torch only what converts
        Python's values, or a slow builtin.

        Args:
            file: as Python has it.
            line: where the frame is; any line of the statement.
        """
        return self._source(file).calls.get(line, "")

    def is_after_backward(self, file: str, line: int, *, may_wait: bool) -> bool:
        """Whether a line is in a loop that calls `backward` above it, or a function of this file that does, and is not
        itself what a step needs.

        Args:
            file: as Python has it.
            line: where the frame is.
            may_wait: whether what it calls may be an operation with tensors, or wait for one.
        """
        source = self._source(file)
        return line in source.after_backward and not (may_wait and line in source.waits)

    def calls_no_package(self, file: str, line: int) -> bool:
        """Whether a line calls no function of a package that may compute with tensors (operations in C++ may keep the
        GIL), it is not excused, and its source is known."""
        source = self._source(file)
        return source.is_read and line not in source.foreign and line not in source.excused

    def is_excused(self, file: str, line: int) -> bool:
        """Whether what a line calls is no finding: `time.sleep`, `gc.collect`, a copy of a model that is trained."""
        return line in self._source(file).excused

    def loops(self, file: str, line: int) -> tuple[range, ...]:
        """Return the lines of each loop or comprehension of a function that a line of it is in, the outermost first,
        without those that cannot be replaced by one operation: see `loops.loops_of`."""
        return self._source(file).loops.get(line, ())

    def repeated(self, file: str, line: int, within: tuple[str, int] | None) -> tuple[int, str] | None:
        """Return whether a line computes the same in every call of its function, in those of several layers, in every
        turn of a loop, or what other ranks do: the line to tell, and one of `record.line_calls`.

        Args:
            file: as Python has it.
            line: where the frame is.
            within: file and line of the frame of the program that it calls; None: it calls none.
        """
        source = self._source(file)
        for name, lines in ((CONSTANT, source.constants), (SAME_IN_LAYERS, source.of_layers)):
            ranges = lines.get(line, ())
            if any(not each or (within is not None and within[0] == file and within[1] in each) for each in ranges):
                return line, name
        return source.repeated.get(line)

    def makes_one_hot(self, file: str, line: int) -> bool:
        """Whether a statement makes a one-hot matrix of floating-point numbers, which products need."""
        return line in self._source(file).one_hot

    def line_in_vain(self, call: str, file: str, line: int) -> int:
        """Return the line to tell of a line that does something in vain, such as the first one of its loop.

        Args:
            call: what it does, one of `record.line_calls` that `_IN_VAIN` has a reading for.
            file: as Python has it.
            line: where the frame is.

        Returns:
            0 if it does no such thing.
        """
        return self._source(file).in_vain.get(call, {}).get(line, 0)

    def idiom(self, file: str, line: int) -> str:
        """Which operation on tensors a line does for which another does far less, see `tensor_idioms`; empty: none."""
        return self._source(file).idioms.get(line, "")

    def drops(self, file: str, line: int) -> str:
        """Return whose samples a line prepares that are dropped then, see `dropped_samples`; empty: it does not."""
        return self._source(file).dropping.get(line, "")

    def is_chained(self, file: str, line: int) -> bool:
        """Whether a line is a collective that needs what the last one of its loop has reduced."""
        return line in self._source(file).chained

    def has_the_same_modules(self, file: str, line: int) -> bool:
        """Whether a line is in a loop that uses the same modules in every turn, see `parametrized`."""
        return line in self._source(file).same_modules

    def scores_line(self, file: str, line: int) -> int:
        """The line that computes what a call on a line is given first, see `loss_scores`; itself if that is unknown."""
        return self._source(file).scores.get(line, line)

    def gives_scores(self, file: str, line: int) -> bool:
        """Whether a line computes what the file gives to `cross_entropy`."""
        return line in self._source(file).of_cross_entropy

    def anomaly_line(self, file: str) -> int:
        """The line on which a file switches torch's anomaly mode on; 0 if it does not."""
        return self._source(file).detects_anomaly

    def _source(self, file: str) -> _Source:
        if file not in self._known:
            if len(self._known) >= _MOST_FILES:
                return _Source()
            self._known[file] = _read(file, self._began_s)
        return self._known[file]


def _read(file: str, until_s: float) -> _Source:
    """What a file says that has not been changed since then (Unix time): the program runs what it was."""
    source = _Source()
    try:
        if not os.path.isabs(file):
            return source
        with open(file, "rb", opener=regular) as opened:
            found = os.fstat(opened.fileno())
            if found.st_size > _MOST_BYTES or found.st_mtime > until_s:
                return source
            tree = ast.parse(opened.read(_MOST_BYTES))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return source
    source.is_read = True
    steps = _unless_it_fails(lambda: functions_that_step(tree), dict[str, ast.FunctionDef]())

    def makes_steps(loop: ast.AST) -> bool:
        return any(makes_step(call, steps) for call in calls_in(loop))

    _unless_it_fails(lambda: _read_statements(source, tree), None)
    source.after_backward = _unless_it_fails(lambda: lines_after_backward(tree, steps), source.after_backward)
    source.loops = _unless_it_fails(lambda: loops_of(tree, makes_steps), source.loops)
    for call, reading in _IN_VAIN.items():
        source.in_vain[call] = _unless_it_fails(partial(_lines_in_vain, reading, tree), dict[int, int]())
    source.idioms = _unless_it_fails(lambda: idioms_of(tree), source.idioms)
    source.constants = _unless_it_fails(lambda: constants_of(tree), source.constants)
    source.of_layers = _unless_it_fails(lambda: constants_of_layers(tree), source.of_layers)
    source.repeated = _unless_it_fails(lambda: lines_of_repeated_work(tree), source.repeated)
    source.dropping = _unless_it_fails(lambda: lines_of_dropped_samples(tree), source.dropping)
    source.chained = _unless_it_fails(lambda: lines_of_chained(tree, makes_steps), source.chained)
    source.same_modules = _unless_it_fails(lambda: loops_with_the_same_modules(tree, makes_steps), source.same_modules)
    known = source.scores, source.of_cross_entropy
    source.scores, source.of_cross_entropy = _unless_it_fails(lambda: lines_of_scores(tree), known)
    forget_nodes(tree)
    return source


def _lines_in_vain(reading: Callable[[ast.Module], dict[int, int] | set[int]], tree: ast.Module) -> dict[int, int]:
    lines = reading(tree)
    return lines if isinstance(lines, dict) else {line: line for line in lines}


def _unless_it_fails(read: Callable[[], T], otherwise: T) -> T:
    """What is read; something else where that fails: an expression is too deep, as a sum of hundreds of terms, or has a
    form that we have not thought of. The other readings of the file count all the same."""
    try:
        return read()
    except Exception:
        return otherwise


def _read_statements(source: _Source, tree: ast.Module) -> None:
    everything = imported_names(tree)
    everything.update(generators_of(tree, everything))
    modules = {name: of for name, of in everything.items() if of.partition(".")[0] not in _NOT_TOLD}
    for node in nodes_of(tree):
        if isinstance(node, ast.stmt) and (call := only_call(node)) and (name := called_name(call, modules)):
            source.name(call, name)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
            if makes_tensors(node, everything):
                source.name(node, TENSOR)
            elif name := on_host_only(node, modules):
                source.name(node, name)
        if isinstance(node, ast.Assign | ast.Return) and makes_one_hot(node):
            source.one_hot.update(lines_of(node))
        if isinstance(node, ast.Call):
            _read_call(source, node, everything)
    source.excused.update(line for copied in trained_copies(tree, everything) for line in lines_of(copied))


def _read_call(source: _Source, call: ast.Call, imported: dict[str, str]) -> None:
    called = called_name(call, imported)
    if method_name(call) in _ON_THE_HOST:
        source.name(call, ast.unparse(call.func)[:_MOST_NAME])
    if method_name(call) in _WAITS:
        source.waits.update(lines_of(call))
    if is_foreign(called):
        source.foreign.update(lines_of(call))
    if called in EXCUSED:
        source.excused.update(lines_of(call))
    if last_name(call) in _ANOMALY and not is_off(call):
        source.detects_anomaly = source.detects_anomaly or call.lineno
