"""What an expression that prepares a sample does, by the words of the source: whether it does no more than to give a
result, which depends on nothing that changes but the sample.

Known are functions that decode or compute, and functions of the file that call only such. Streams, codecs, stores and
random numbers depend on each sample before.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from gpulaunch.profiler.samplers.called_names import called_name
from gpulaunch.profiler.samplers.function_bodies import is_plain_call, is_set, statements_in
from gpulaunch.profiler.samplers.loops import calls_in, imported_names, last_name
from gpulaunch.profiler.samplers.syntax import assigned_in, dotted, names_in, names_set, nodes_of
from gpulaunch.profiler.samplers.tensor_functions import COMPUTE, NUMBERS, ROOM, VIEWS, only_computes

_PLAIN: Final = (
    *(ast.Constant, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop, ast.BoolOp, ast.boolop, ast.IfExp, ast.Tuple),
    *(ast.List, ast.Dict, ast.Slice, ast.keyword, ast.expr_context),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Is, ast.IsNot),
)
"""Parts of an expression that are known if their own parts are. Not `in`: it asks an object that may do more."""
_DECODERS: Final = frozenset(
    {
        *("zlib.decompress", "gzip.decompress", "lzma.decompress", "bz2.decompress", "base64.b64decode", "json.loads"),
        *("orjson.loads", "pickle.loads", "struct.unpack", "struct.unpack_from", "io.BytesIO", "io.StringIO"),
        *("PIL.Image.open", "cv2.imdecode", "cv2.imread", "cv2.resize", "cv2.cvtColor", "cv2.GaussianBlur"),
        *("cv2.warpAffine", "numpy.frombuffer", "torch.frombuffer", "numpy.load", "torch.load", "torch.stft"),
        *("torchvision.io.decode_image", "torchvision.io.decode_jpeg", "torchvision.io.read_image", "torchaudio.load"),
        *("soundfile.read", "librosa.load", "librosa.feature.melspectrogram", "librosa.stft", "librosa.resample"),
        *("scipy.signal.stft", "scipy.signal.spectrogram", "scipy.signal.resample", "scipy.signal.resample_poly"),
    }
)
_READ: Final = frozenset({"open", "imread", "load", "read_image", "read"})
"""Of a stream they would read the next one."""
_KEEPS_NOTHING: Final = re.compile(
    r"(?:torchvision|torchaudio)\.transforms\..+|(?:tokenizers|transformers)\.\w*Tokenizer\w*(?:\.\w+)?"
)
"""Transforms and tokenizers of packages."""
_GIVEN: Final = frozenset({"tokenize", "tokenizer", "transform", "transforms"})
"""What a dataset is given to prepare a sample."""
_THREE: Final = frozenset({"where", "clip", "clamp", "linspace", "arange", "full", "einsum", "roll"})
"""What takes a third argument that is not the result."""
_COMPUTE: Final = COMPUTE | NUMBERS | ROOM | VIEWS | {"arctan2", "hypot", "arctan", "arcsin", "arccos", "max", "min"}
_METHODS: Final = (_COMPUTE - {"add", "sort"}) | {
    *("copy", "convert", "resize", "crop", "rotate", "numpy", "tobytes", "strip", "lstrip", "rstrip", "lower", "upper"),
    *("replace", "splitlines", "var", "item", "tolist"),
}
_BUILTINS: Final = frozenset({"abs", "bool", "float", "int", "len", "max", "min", "range", "round"})
_MOST_DEPTH: Final = 3
"""Functions of the file that call each other and are followed."""


@dataclass(frozen=True)
class Scope:
    """Where an expression is."""

    names: frozenset[str]
    """What is set for each sample."""
    numbers: frozenset[str] = frozenset()
    """Of them those that count the samples."""
    depth: int = _MOST_DEPTH
    """Of functions of the file that may call each other."""

    def is_in(self, node: ast.AST) -> bool:
        """Whether something depends on the sample."""
        return not self.names.isdisjoint(names_in(node))


class Expressions:
    """Those of a file."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = nodes_of(tree)
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        times = Counter(each.name for each in functions)
        arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
        self._functions = {
            each.name: each for each in functions if times[each.name] == 1 and each.name not in arguments
        }
        self._special = set(times) & {"__call__", "__getitem__"}
        self._imported = imported_names(tree)
        named = (node for node in nodes if isinstance(node, ast.Name | ast.Attribute))
        self._sets = Counter(dotted(node) for node in named if is_set(node))
        self._sets.update(dotted(node.target) for node in nodes if isinstance(node, ast.AugAssign))
        self._sets.update(node.asname or node.name for node in nodes if isinstance(node, ast.alias))
        self._made = {dotted(target): value for target, value in assigned_in(nodes) if not isinstance(value, ast.Name)}

    def is_known(self, node: ast.AST, scope: Scope) -> bool:
        """Whether an expression only gives a result that depends on nothing that changes but the sample."""
        match node:
            case ast.Name(id=name):
                return name in scope.names or self._sets[name] <= 1
            case ast.Call():
                parts = [*node.args, *(each.value for each in node.keywords)]
                is_known = is_plain_call(node) and all(self.is_known(each, scope) for each in parts)
                return is_known and self._gives_result(node, scope)
            case ast.Attribute(value=value, attr=attr):
                is_same = self._sets[dotted(node)] <= 1 and attr not in self._functions  # that may be a property
                return is_same and self.is_known(value, scope)
            case ast.Subscript(value=value, slice=index):
                # a store may make what it has not: `ids[word]`
                by_number = isinstance(index, ast.Name) and index.id in scope.numbers and not self._special
                is_safe = scope.is_in(value) or by_number or not scope.is_in(index)
                return is_safe and self.is_known(value, scope) and self.is_known(index, scope)
            case ast.ListComp(generators=[ast.comprehension(target=target, iter=over, ifs=[], is_async=0)], elt=each):
                is_finite = isinstance(over, ast.Call)  # else it may be a part of the stream
                within = replace(scope, names=scope.names | names_in(target))
                return is_finite and self.is_known(over, scope) and self.is_known(each, within)
            case _:
                is_plain = isinstance(node, _PLAIN)
                return is_plain and all(self.is_known(each, scope) for each in ast.iter_child_nodes(node))

    def _gives_result(self, call: ast.Call, scope: Scope) -> bool:
        name, whole = last_name(call), dotted(call.func)
        if (full := called_name(call, self._imported)) and whole.partition(".")[0] not in scope.names:
            if full in _DECODERS:
                if not all(isinstance(node, ast.Constant) for each in call.keywords for node in nodes_of(each.value)):
                    return False  # a function may be given that is called
                return name not in _READ or (len(call.args) == 1 and scope.is_in(call.args[0]))
            has_out = len(call.args) > 2 and name not in _THREE
            return name in _COMPUTE and only_computes(full) and not has_out
        if whole in (name, f"self.{name}") and name in self._functions and not self._sets[whole]:
            return scope.depth > 0 and self._is_function_known(self._functions[name], call, scope)
        if whole.startswith("self."):
            return self._keeps_nothing(whole.removesuffix(".encode"))
        if whole == name:
            takes_one = len(call.args) == 1 and name in ("max", "min")  # of a part of the stream
            return name in _BUILTINS and not self._sets[name] and not takes_one
        if not isinstance(call.func, ast.Attribute):
            return False
        of_sample = scope.is_in(call.func.value) and self.is_known(call.func.value, scope)
        is_text = name in ("encode", "decode") and all(isinstance(each, ast.Constant) for each in call.args)
        return of_sample and (name in _METHODS or (is_text and bool(call.args)))

    def _keeps_nothing(self, attribute: str) -> bool:
        """Whether an attribute is a transform, or a tokenizer: made of parts of packages alone, or an argument."""
        made = self._made.get(attribute)
        if self._sets[attribute] != 1 or (made is None and self._special):
            return False
        if not isinstance(made, ast.Call):
            return made is None and attribute.removeprefix("self.") in _GIVEN
        return all(_KEEPS_NOTHING.fullmatch(called_name(call, self._imported)) for call in calls_in(made))

    def _is_function_known(self, function: ast.FunctionDef, call: ast.Call, scope: Scope) -> bool:
        names = [each.arg for each in function.args.args if each.arg != "self"]
        given = [*zip(names, call.args, strict=False), *((each.arg or "", each.value) for each in call.keywords)]
        of_sample = {name for name, value in given if scope.is_in(value)}
        inside = {node.id for node in nodes_of(function) if isinstance(node, ast.Name) and is_set(node)}
        within = Scope(frozenset(of_sample | inside), depth=scope.depth - 1)
        if function.decorator_list or not of_sample:
            return False
        for statement in statements_in(function.body):
            match statement:
                case ast.Assign(value=value) if names_set(statement):
                    parts = [value]
                case ast.Return(value=ast.expr() as value):
                    parts = [value]
                case ast.If(test=test):
                    parts = [test]
                case ast.For(iter=ast.Call() as over):
                    parts = [over]
                case ast.Expr(value=ast.Constant()) | ast.Raise():
                    parts = []
                case _:
                    return False
            if not all(self.is_known(each, within) for each in parts):
                return False
        return True
