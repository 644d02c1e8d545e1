"""Reads in the source of a program what a line calls, where a stack does not show it: functions written in C.

Only names count: nothing is imported or run. A file that cannot be read or parsed gives nothing.
"""

from __future__ import annotations

import ast
import os
import sys
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from typing import Final, TypeVar

from gpulaunch.profiler.files import regular
from gpulaunch.profiler.record.line_calls import CONSTANT, SAME_IN_LAYERS
from gpulaunch.profiler.samplers.adam_by_hand import lines_of_adam
from gpulaunch.profiler.samplers.after_backward import functions_that_step, lines_after_backward, makes_step
from gpulaunch.profiler.samplers.called_names import called_name, generators_of
from gpulaunch.profiler.samplers.chained_collectives import lines_of_chained
from gpulaunch.profiler.samplers.constants import constants_of, constants_of_layers
from gpulaunch.profiler.samplers.dropped_samples import lines_of_dropped_samples
from gpulaunch.profiler.samplers.element_loops import loops_over_elements
from gpulaunch.profiler.samplers.loops import calls_in, imported_names, last_name, lines_of, loops_of, method_name
from gpulaunch.profiler.samplers.loss_scores import lines_of_scores
from gpulaunch.profiler.samplers.observers import observers_of
from gpulaunch.profiler.samplers.parametrized import loops_with_the_same_modules
from gpulaunch.profiler.samplers.repeated_passes import passes_for_metrics
from gpulaunch.profiler.samplers.repeated_work import lines_of_repeated_work
from gpulaunch.profiler.samplers.sampled_calls import on_the_host
from gpulaunch.profiler.samplers.syntax import dotted, forget_nodes, nodes_of
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
_ARGUMENTS: Final = (ast.Name, ast.Attribute, ast.Constant, ast.Starred, ast.keyword, ast.expr_context)
"""What may be in the arguments of a call that is named: nothing that computes or waits itself."""
_KEY: Final = (*_ARGUMENTS, ast.Lambda, ast.arguments, ast.arg, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.USub)
"""What may be in a `lambda` that only picks a part of an element, such as what `sorted` sorts by."""
_PICKS: Final = frozenset({"attrgetter", "itemgetter"})
_RESULTS: Final = frozenset({"encode", "digest", "hexdigest", "tobytes", "getvalue"})
"""Methods without arguments that give what is no tensor another form."""
_CONVERTS: Final = _RESULTS | {"fileno", "numpy", "detach"}
"""Those that wait for no GPU, of what is given to a function."""
_TENSOR: Final = "torch.tensor"
_TENSORS: Final = frozenset({_TENSOR, "torch.as_tensor", "torch.Tensor", "torch.FloatTensor", "torch.LongTensor"})
"""Functions that make a tensor of Python's values, which they convert one by one."""
_CHEAP: Final = frozenset({"list", "tuple", "zip", "range", "enumerate", "len", "int", "float", "bool", "append"})
"""Builtin functions and methods that take little time beside others."""
_AROUND_TENSORS: Final = _CHEAP | {"reversed", "to", "long", "unsqueeze", "view", "reshape", "items", "keys", "values"}
"""Functions and methods that take little time beside that."""
_AROUND_CALLS: Final = _CHEAP | {"dict", "set", "str", "bytes"}
"""Those beside functions of libraries."""
_PLAIN: Final = (
    *(ast.stmt, ast.Call, ast.Name, ast.Attribute, ast.Constant, ast.Starred, ast.keyword, ast.expr_context),
    *(ast.Subscript, ast.Slice, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp, ast.unaryop),
    *(ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
)
"""What may be in such a statement: nothing that computes with tensors."""
_WAITS: Final = frozenset({"item", "to"})
"""Methods that wait for the GPU, often of an argument of a call that takes time itself: `log(loss.item())`."""
_FLOATS: Final = frozenset({"float", "half", "bfloat16", "double", "to", "type", "type_as"})
_JOINS: Final = frozenset({"cat", "concat", "concatenate", "hstack", "column_stack"})
_NOT_TOLD: Final = frozenset(
    {"torch", "torchvision", "__future__", "gc", "time", "math", "operator", "functools", "itertools", "sys"}
)
"""Modules whose functions are torch's own compute or take no time of their own."""
_EXCUSED: Final = frozenset({"time.sleep", "gc.collect", "scipy.optimize.linear_sum_assignment"})
"""Functions that are no finding of a line: one sleeps on purpose, collections have a rule of their own, and a loss
that assigns what is predicted to what is meant needs that."""
_DEEPCOPY: Final = "copy.deepcopy"
_ANOMALY: Final = frozenset({"set_detect_anomaly", "detect_anomaly"})
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
    elements: dict[int, int] = field(default_factory=dict[int, int])
    of_adam: dict[int, int] = field(default_factory=dict[int, int])
    for_metrics: set[int] = field(default_factory=set[int])
    idioms: dict[int, str] = field(default_factory=dict[int, str])
    observers: set[int] = field(default_factory=set[int])
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

    def loop_over_elements(self, file: str, line: int) -> int:
        """The first line of the loop in which a statement takes a tensor apart, see `element_loops`; 0: it does not."""
        return self._source(file).elements.get(line, 0)

    def loop_of_adam(self, file: str, line: int) -> int:
        """The first line of the loop of an optimizer that a line is in, see `adam_by_hand`; 0: it is in none."""
        return self._source(file).of_adam.get(line, 0)

    def is_pass_for_metric(self, file: str, line: int) -> bool:
        """Whether a line makes a forward pass again, only to compare its predictions, see `repeated_passes`."""
        return line in self._source(file).for_metrics

    def is_observer(self, file: str, line: int) -> bool:
        """Whether a line is in a function that only computes statistics of tensors."""
        return line in self._source(file).observers

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
    source.elements = _unless_it_fails(lambda: loops_over_elements(tree), source.elements)
    source.of_adam = _unless_it_fails(lambda: lines_of_adam(tree), source.of_adam)
    source.for_metrics = _unless_it_fails(lambda: passes_for_metrics(tree), source.for_metrics)
    source.idioms = _unless_it_fails(lambda: idioms_of(tree), source.idioms)
    source.observers = _unless_it_fails(lambda: observers_of(tree), source.observers)
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
        if isinstance(node, ast.stmt) and (call := _only_call(node)) and (name := called_name(call, modules)):
            source.name(call, name)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
            if _makes_tensors(node, everything):
                source.name(node, _TENSOR)
            elif name := _on_host_only(node, modules):
                source.name(node, name)
        if isinstance(node, ast.Assign | ast.Return) and _makes_one_hot(node):
            source.one_hot.update(lines_of(node))
        if isinstance(node, ast.Call):
            _read_call(source, node, everything)
    source.excused.update(line for copied in _trained_copies(tree, everything) for line in lines_of(copied))


def _read_call(source: _Source, call: ast.Call, imported: dict[str, str]) -> None:
    called = called_name(call, imported)
    if method_name(call) in _ON_THE_HOST:
        source.name(call, ast.unparse(call.func)[:_MOST_NAME])
    if method_name(call) in _WAITS:
        source.waits.update(lines_of(call))
    if _is_foreign(called):
        source.foreign.update(lines_of(call))
    if called in _EXCUSED:
        source.excused.update(lines_of(call))
    if last_name(call) in _ANOMALY and not _is_off(call):
        source.detects_anomaly = source.detects_anomaly or call.lineno


def _trained_copies(tree: ast.Module, imported: dict[str, str]) -> Iterator[ast.stmt]:
    """The statements that copy a model of which an optimizer, or `grad`, is given the parameters, as meta-learning and
    simulated clients do: `SGD(clone.parameters())`."""
    trained = {
        name
        for call in calls_in(tree)
        if last_name(call)[:1].isupper() or last_name(call) == "grad"
        for argument in call.args
        for each in calls_in(argument)
        if isinstance(each.func, ast.Attribute) and each.func.attr == "parameters" and (name := dotted(each.func.value))
    }
    for node in nodes_of(tree):
        match node:
            case ast.Assign(targets=[target], value=ast.Call() as call) if called_name(call, imported) == _DEEPCOPY:
                if dotted(target) in trained:
                    yield node
            case _:
                pass


def _makes_one_hot(statement: ast.stmt) -> bool:
    names = {last_name(call) for call in calls_in(statement)}
    # Beside something else in one row of a product, it may be a few columns of many.
    return "one_hot" in names and not names.isdisjoint(_FLOATS) and names.isdisjoint(_JOINS)


def _is_foreign(called: str) -> bool:
    """Whether a function that a file imports is neither of Python's library nor of a package without tensors."""
    return called != "" and not _is_on_host(called)


def _only_call(statement: ast.stmt) -> ast.Call | None:
    """The call that is all that a statement does; None if something else in it may take the time."""
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
        return None
    call = statement.value
    while isinstance(call, ast.Call) and _converts(call, _RESULTS) and isinstance(call.func, ast.Attribute):
        call = call.func.value
    if not isinstance(call, ast.Call):
        return None
    return call if all(map(_takes_no_time, (*call.args, *call.keywords))) else None


def _on_host_only(statement: ast.stmt, modules: dict[str, str]) -> str:
    """Return the function of a library that takes the time of a statement all of whose calls are such functions,
    methods of what these return, or cheap: the outermost one, and one of numpy, which is often around others, only if
    there is no other. Empty: there is none, or something else in it may take the time."""
    nodes = nodes_of(statement)  # the outermost first
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    names = {call: name for call in calls if (name := called_name(call, modules)) not in _EXCUSED and _is_on_host(name)}
    if not all(isinstance(node, (*_PLAIN, ast.IfExp)) for node in nodes):
        return ""
    if any(isinstance(node, ast.Subscript) and any(calls_in(node.slice)) for node in nodes):
        return ""  # `table[np.argsort(rows)]`
    if not all(call in names or last_name(call) in _AROUND_CALLS or _returned_by(call) in names for call in calls):
        return ""
    return next((name for name in names.values() if not name.startswith("numpy.")), next(iter(names.values()), ""))


def _is_on_host(function: str) -> bool:
    """Whether a function that a file imports is of Python's library, or of a package without tensors."""
    return function.partition(".")[0] in sys.stdlib_module_names or on_the_host(function)


def _returned_by(call: ast.Call) -> ast.Call | None:
    """The call that has returned the object of which this one calls a method, directly or through other methods."""
    of, found = call, None
    while isinstance(of.func, ast.Attribute) and isinstance(of.func.value, ast.Call):
        of = found = of.func.value
    return found


def _makes_tensors(statement: ast.stmt, imported: dict[str, str]) -> bool:
    """Whether all that takes time in a statement is that it makes tensors of Python's values."""
    nodes = nodes_of(statement)
    makes = {node for node in nodes if isinstance(node, ast.Call) and called_name(node, imported) in _TENSORS}
    return bool(makes) and all(
        isinstance(node, _PLAIN)
        and (not isinstance(node, ast.Call) or node in makes or _is_around_tensors(node))
        and (not isinstance(node, ast.Subscript) or not any(calls_in(node)))  # `table[torch.tensor(rows)]`
        for node in nodes
    )


def _is_around_tensors(call: ast.Call) -> bool:
    if last_name(call) == "map" and call.args:
        return isinstance(call.args[0], ast.Name) and call.args[0].id in _AROUND_TENSORS
    return last_name(call) in _AROUND_TENSORS


def _takes_no_time(argument: ast.AST) -> bool:
    if isinstance(argument, ast.keyword) and isinstance(argument.value, ast.Lambda):
        return all(isinstance(node, _KEY) for node in nodes_of(argument.value))
    return all(isinstance(node, _ARGUMENTS) or _is_cheap(node) for node in nodes_of(argument))


def _is_cheap(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and (last_name(node) in _PICKS or _converts(node, _CONVERTS))


def _converts(call: ast.Call, methods: Set[str]) -> bool:
    return not call.args and not call.keywords and method_name(call) in methods


def _is_off(call: ast.Call) -> bool:
    """`set_detect_anomaly(False)`."""
    values = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)
