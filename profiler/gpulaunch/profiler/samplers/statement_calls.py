"""Tells what a statement calls that may be all that takes time in it, by the names in the source alone."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Set
from typing import Final

from gpulaunch.profiler.samplers.called_names import called_name
from gpulaunch.profiler.samplers.loops import calls_in, last_name, method_name, owner_of
from gpulaunch.profiler.samplers.sampled_calls import on_the_host
from gpulaunch.profiler.samplers.syntax import dotted, nodes_of

_ARGUMENTS: Final = (ast.Name, ast.Attribute, ast.Constant, ast.Starred, ast.keyword, ast.expr_context)
"""What may be in the arguments of a call that is named: nothing that computes or waits itself."""
_KEY: Final = (*_ARGUMENTS, ast.Lambda, ast.arguments, ast.arg, ast.Subscript, ast.Tuple, ast.UnaryOp, ast.USub)
"""What may be in a `lambda` that only picks a part of an element, such as what `sorted` sorts by."""
_PICKS: Final = frozenset({"attrgetter", "itemgetter"})
_RESULTS: Final = frozenset({"encode", "digest", "hexdigest", "tobytes", "getvalue"})
"""Methods without arguments that give what is no tensor another form."""
_CONVERTS: Final = _RESULTS | {"fileno", "numpy", "detach"}
"""Those that wait for no GPU, of what is given to a function."""
TENSOR: Final = "torch.tensor"
_TENSORS: Final = frozenset({TENSOR, "torch.as_tensor", "torch.Tensor", "torch.FloatTensor", "torch.LongTensor"})
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
_FLOATS: Final = frozenset({"float", "half", "bfloat16", "double", "to", "type", "type_as"})
_JOINS: Final = frozenset({"cat", "concat", "concatenate", "hstack", "column_stack"})
EXCUSED: Final = frozenset({"time.sleep", "gc.collect", "scipy.optimize.linear_sum_assignment"})
"""Functions that are no finding of a line: one sleeps on purpose, collections have a rule of their own, and a loss
that assigns what is predicted to what is meant needs that."""
_DEEPCOPY: Final = "copy.deepcopy"


def trained_copies(tree: ast.Module, imported: dict[str, str]) -> Iterator[ast.stmt]:
    """The statements that copy a model of which an optimizer, or `grad`, is given the parameters, as meta-learning and
    simulated clients do: `SGD(clone.parameters())`."""
    trained = {
        name
        for call in calls_in(tree)
        if last_name(call)[:1].isupper() or last_name(call) == "grad"
        for argument in call.args
        for each in calls_in(argument)
        if method_name(each) == "parameters" and (name := owner_of(each))
    }
    for node in nodes_of(tree):
        match node:
            case ast.Assign(targets=[target], value=ast.Call() as call) if called_name(call, imported) == _DEEPCOPY:
                if dotted(target) in trained:
                    yield node
            case _:
                pass


def makes_one_hot(statement: ast.stmt) -> bool:
    """Whether a statement makes a one-hot matrix of floating-point numbers, and nothing is joined to it."""
    names = {last_name(call) for call in calls_in(statement)}
    # Beside something else in one row of a product, it may be a few columns of many.
    return "one_hot" in names and not names.isdisjoint(_FLOATS) and names.isdisjoint(_JOINS)


def is_foreign(called: str) -> bool:
    """Whether a function that a file imports is neither of Python's library nor of a package without tensors."""
    return called != "" and not _is_on_host(called)


def only_call(statement: ast.stmt) -> ast.Call | None:
    """The call that is all that a statement does; None if something else in it may take the time."""
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
        return None
    call = statement.value
    while isinstance(call, ast.Call) and _converts(call, _RESULTS) and isinstance(call.func, ast.Attribute):
        call = call.func.value
    if not isinstance(call, ast.Call):
        return None
    return call if all(map(_takes_no_time, (*call.args, *call.keywords))) else None


def on_host_only(statement: ast.stmt, modules: dict[str, str]) -> str:
    """Return the function of a library that takes the time of a statement all of whose calls are such functions,
    methods of what these return, or cheap: the outermost one, and one of numpy, which is often around others, only if
    there is no other. Empty: there is none, or something else in it may take the time."""
    nodes = nodes_of(statement)  # the outermost first
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    names = {call: name for call in calls if (name := called_name(call, modules)) not in EXCUSED and _is_on_host(name)}
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


def makes_tensors(statement: ast.stmt, imported: dict[str, str]) -> bool:
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


def is_off(call: ast.Call) -> bool:
    """`set_detect_anomaly(False)`."""
    values = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)
