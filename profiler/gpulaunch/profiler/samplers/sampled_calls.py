"""Finds the call of the program that a sampled stack of the training thread is in.

A rank's phases say how long a step was outside of the model, not why. Stacks do: the innermost line of the user's own
program, and the library function that it calls. Torch's own work is left out: it is what a step is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, Literal

from gpulaunch.profiler.record.line_calls import ANOMALY, KEEPS_LOGITS
from gpulaunch.profiler.samplers.paths import OWN_DIRS, PACKAGES_DIR, PYTHON_DIR
from gpulaunch.profiler.stack import Frame

Origin = Literal["program", "python", "package", "torch", "gpulaunch"]

_ORIGINS: Final[tuple[tuple[Origin, re.Pattern[str]], ...]] = (
    ("gpulaunch", re.compile(OWN_DIRS)),
    ("torch", re.compile(rf"{PACKAGES_DIR}(?P<module>(?:torch|torchgen|functorch|triton)/.+)")),
    ("torch", re.compile(r".*/(?P<module>torchinductor_[^/]+/.+)")),
    ("package", re.compile(rf"{PACKAGES_DIR}(?P<module>.+)")),
    ("python", re.compile(rf"(?:{PYTHON_DIR}|<(?!stdin|string|ipython))(?:frozen )?(?P<module>.+)")),
)
_CARRIES: Final = re.compile(
    r"(?:contextlib|functools|runpy|threading|asyncio/.+|concurrent/.+|multiprocessing/.+|unittest/.+|cProfile|profile"
    r"|bdb|pdb)\.py|runpy>|__array_function__ internals>"
)
"""Modules of Python that call what they are given: what is below them is meant."""
_WRAPPER: Final = re.compile(r"_?(?:wrap(?:per|ped|s)?|inner(?:_\w+)?|decorat\w+|<lambda>)")
_ON_THE_HOST: Final = re.compile(
    r"(?:sklearn|scipy|pandas|PIL|cv2|skimage|matplotlib|numpy|nltk|spacy|evaluate|rouge_score|sacrebleu|tokenizers"
    r"|sentencepiece|tiktoken|transformers\.tokenization\w*|requests|urllib3|httpx|boto3|botocore|h5py|lmdb|zarr|pyarrow"
    r"|orjson|ujson|yaml|psutil|networkx|polars|xarray|datasets|imageio|librosa|soundfile|albumentations|seaborn|plotly"
    r"|rich|tabulate|loguru|joblib|dill|msgpack|sqlalchemy|redis|pymongo|wandb|mlflow|tensorboardX?|comet_ml|neptune"
    r"|clearml|seqeval|jiwer|pycocotools|gensim|rdkit|shapely|statsmodels)\..+"
    r"|torchmetrics\.\w+\.(?:compute|update)"
)
"""Packages that do not compute with tensors, and metrics that a program asks for itself. Of others it is not known: a
loss or a layer may be theirs."""
_METRICS: Final = re.compile(
    r"(?:sklearn\.metrics|torchmetrics|evaluate|pycocotools|seqeval|jiwer|rouge_score|sacrebleu)\b"
    r"|accelerate\..*\bgather_for_metrics|torch\.distributed\..*_object(?:_list)?$"
)
"""Packages of metrics, and functions that are in place where those are."""
_METRIC: Final = re.compile(
    r".*/torchmetrics/(?:metric\.py (?:.*\.)?wrapped_func|collections\.py (?:MetricCollection\.)?(?:update|compute))"
)
"""Around these methods of a metric (torchmetrics 1.9). Its `forward`, which may be a loss, is called as a module's."""
_METHODS: Final = ("compute", "update")
_GATHERING: Final = frozenset(
    {
        *("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict", "full_tensor"),
        *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "gather_for_metrics"),
    }
)
"""Functions of torch.distributed, and of Accelerate, that gather by collectives: the state of all ranks, a tensor that
is sharded, any object (by `pickle`), or predictions."""
_TORCH_CALLS: Final = _GATHERING | {
    *("empty_cache", "state_dict", "load_state_dict", "update_parameters", "__repr__", "__format__")
}
"""Functions of torch that are not a part of a step's compute: freeing or copying what could stay, printing tensors."""
_OF_THE_MODEL: Final = ("data_wait", "forward", "backward", "optimizer")
"""Phases of every training step. `forward` is all from the batch to `backward`: what prepares the batch, the loss."""
_ANOMALY: Final = re.compile(r"/torch/fx/traceback\.py format_stack$")
"""What torch calls at every operation to record where it was made, if `set_detect_anomaly` is on (torch 2.13)."""
BUFFERS: Final = "torch.nn.parallel.DistributedDataParallel._sync_buffers"
_BUFFERS: Final = re.compile(r"/torch/nn/parallel/distributed\.py (?:.*\.)?_sync_(?:module_)?buffers$")
"""What DDP calls before a forward pass to send the buffers of the first rank to all others (torch 2.13)."""
_DECORATES: Final = "/torch/utils/_contextlib.py"
"""What calls a function that `@torch.no_grad()` and the like decorate (torch 2.13)."""
MODULE: Final = "/torch/nn/modules/module.py"
_FORWARD: Final = frozenset({"forward", "__call__"})
_LINEAR: Final = (MODULE, "/torch/nn/modules/linear.py")
_OPTIMIZER: Final = "/torch/optim/optimizer.py"
_CALLS_THE_MODEL: Final = (MODULE, "/torch/autograd/function.py")
_COMPILED: Final = re.compile(r".*/torch/(?:_dynamo|_functorch|_inductor|_library)/")
"""What calls code that torch has generated, wherever that is, and operations that a program has registered."""
_LOSS: Final = re.compile(r".*/torch/nn/modules/(?:loss|distance)\.py")
"""Modules without parameters: a loop that calls one for each sample is no loop over layers."""
BACKWARD: Final = re.compile(r"/torch/autograd/(?:graph|__init__)\.py$")
_FETCH: Final = "/torch/utils/data/_utils/fetch.py"
_SAMPLES: Final = re.compile(r"/torch/utils/data/(?:dataloader\.py \S*_next_index|sampler\.py \S*)$")
"""Where a dataloader asks its sampler for the indices of a batch, on the training thread."""
_ORDER: Final = re.compile(r"/torch/utils/data/(?:sampler|distributed)\.py$")
"""Where torch's own samplers draw the order of the samples of an epoch, and where they are before it is drawn."""
_LOCK: Final = re.compile(
    rf"{PYTHON_DIR}multiprocessing/synchronize\.py|{PACKAGES_DIR}(?:filelock|portalocker|fasteners)[/.]"
)
_SAVES: Final = re.compile(r"_?(?:save|write|remove|rotate)_(?:\w+_)?(?:checkpoint|ckpt|state|snapshot)s?|_atomic_save")
"""Functions of programs and trainers that save their state, by name: they copy, rename and remove besides."""
_HOOK: Final = re.compile(r"on_[a-z]+(?:_[a-z]+)+")
"""Methods of a callback that a trainer calls between the parts of its steps, such as `on_train_batch_end`."""
_COLLATES_LISTS: Final = re.compile(
    r"/torch/utils/data/_utils/collate\.py (?:default_collate|collate|collate_float_fn|collate_int_fn)(?:\.<.*)?$"
)
_COLLATES_ANYTHING: Final = re.compile(r"/transformers/data/data_collator\.py torch_default_data_collator$")
"""It stacks tensors, too: only some of its lines convert lists."""
_ANSWERS: Final = re.compile(r"multiprocessing\.connection\.(?:recv|recv_bytes|poll|wait)")
"""Functions that wait for what another process computes, such as an environment: the program asked for it."""
_KEEPS: Final = re.compile(r"/transformers/trainer_pt_utils\.py nested_concat$")


@dataclass(frozen=True)
class Call:
    """Where the program is."""

    file: str
    """Of the program's innermost line, as Python has it."""
    line: int
    name: str = ""
    """The function that the line calls, such as `copy.deepcopy`; empty: one written in C, or none."""
    origin: Origin = "program"
    """Of that function; "program" if there is none, too."""
    within_torch: bool = False
    """Torch's own code runs below the call."""
    in_model: bool = False
    """A module or an autograd function of torch has called the line."""
    in_function: bool = False
    """It is such a function: an operation of the program's own."""


def undecorated(frames: Sequence[Frame]) -> list[Frame]:
    """Return a stack as it would be without torch's decorators of functions: what they call, their caller does."""
    return [frame for frame in frames if not frame.file.endswith(_DECORATES)]


def call_of(frames: Sequence[Frame]) -> Call | None:
    """Return the call that a stack is in; None if nothing of it is the program's.

    Args:
        frames: the deepest first.
    """
    depth = _innermost(frames)
    if depth is None:
        return None
    called = [f"{frame.file} {frame.name}" for frame in frames[:depth]]
    if any(map(_ANOMALY.search, called)):
        model = _model_call(frames)
        return Call(model.file, model.line, ANOMALY, "python")
    if any(map(_BUFFERS.search, called)):
        return Call(frames[depth].file, frames[depth].line, BUFFERS, "python")
    line = frames[depth]
    if any(map(_KEEPS.search, called)):
        return Call(line.file, line.line, KEEPS_LOGITS, "python")
    below = [(frame, *_origin(frame.file)) for frame in reversed(frames[:depth])]
    below = [each for each in below if each[1] != "gpulaunch"]
    models = [frame.file for frame in frames[depth:] if frame.file.endswith(_CALLS_THE_MODEL)]
    in_model, in_function = bool(models), bool(models) and not models[0].endswith(MODULE)
    if not below:
        return Call(line.file, line.line, in_model=in_model)
    if _METRIC.fullmatch(f"{below[0][0].file} {below[0][0].name}"):
        method = next((each.name for each, *_ in below[:2] if _function(each) in _METHODS), "Metric.compute")
        name = f"torchmetrics.{method if '.' in method else f'Metric.{method}'}"
        return Call(line.file, line.line, name, "package", in_model=in_model)
    meant = (each for each in below if not _WRAPPER.fullmatch(_function(each[0])) and not _CARRIES.fullmatch(each[2]))
    callee, origin, module = next(meant, below[0])
    name = _dotted(module, _function(callee))
    if name.endswith(".full_tensor"):  # an optimizer of the program may need all of a gradient
        in_model = in_model or any(frame.file.endswith(_OPTIMIZER) for frame in frames[depth:])
    return Call(line.file, line.line, name, origin, any(each[1] == "torch" for each in below), in_model, in_function)


def lines_of_program(frames: Sequence[Frame]) -> list[Call]:
    """Return the lines of the program on a stack and which function of the program each calls, the outermost first.

    Args:
        frames: the deepest first.
    """
    lines: list[Call] = []
    calls = ""
    for frame in frames:
        if _origin(frame.file)[0] == "program":
            lines.insert(0, Call(frame.file, frame.line, calls))
            calls = _function(frame)
    return lines


def function_of_thread(frames: Sequence[Frame]) -> tuple[str, str] | None:
    """Return the outermost function of the program that a thread runs, as its file and its name; without one an empty
    file, and the outermost function of a package. None: it is a thread of torch or of gpulaunch.

    Args:
        frames: the deepest first.
    """
    in_package = ""
    for frame in reversed(frames):
        origin, module = _origin(frame.file)
        if origin == "program":
            return frame.file, frame.name.rpartition("<locals>.")[2]
        if not in_package and not _CARRIES.fullmatch(module):
            if origin in ("torch", "gpulaunch"):
                return None
            in_package = _dotted(module, _function(frame))
    return ("", in_package) if in_package else None


def loops_may_be_in(frames: Sequence[Frame]) -> list[tuple[Frame, bool]]:
    """Return the frames of the program, the innermost first, and whether what each calls is a module of torch other
    than a loss, as far as it is known which one.

    Args:
        frames: the deepest first.
    """
    found: list[tuple[Frame, bool]] = []
    calls_module = False
    callee = ""
    for frame in frames:
        if frame.file.endswith(MODULE):
            calls_module = calls_module or (callee != "" and not _LOSS.fullmatch(callee))
        else:
            callee = frame.file
        if _origin(frame.file)[0] == "program":
            found.append((frame, calls_module))
    return found


def around_backward(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames of the program that a backward pass was called from; not those that a checkpoint in it runs.

    Args:
        frames: the deepest first.
    """
    engine = max((depth for depth, frame in enumerate(frames) if BACKWARD.search(frame.file)), default=len(frames))
    return [frame for frame in frames[engine:] if _origin(frame.file)[0] == "program"]


def in_sampler(frames: Sequence[Frame]) -> bool:
    """Whether the innermost line of the program is in a sampler that a dataloader asks for the indices of a batch.

    Args:
        frames: the deepest first.
    """
    depth = _innermost(frames)
    return depth is not None and any(_SAMPLES.search(f"{frame.file} {frame.name}") for frame in frames[depth:])


def draws_order(frames: Sequence[Frame]) -> bool:
    """Whether a stack of the training thread is in a sampler of torch's, the deepest frame first: in an epoch of many
    batches that is rare."""
    return _ORDER.search(frames[0].file) is not None


def in_compiled(frames: Sequence[Frame]) -> bool:
    """Whether the innermost frame of a stack is called by what runs code that torch has generated, or operations."""
    return len(frames) > 1 and _COMPILED.match(frames[1].file) is not None


def in_callback(frames: Sequence[Frame]) -> tuple[Call, str] | None:
    """Return the program's line in a method that a trainer calls between the parts of its steps, and the name of that;
    None outside of one.

    Args:
        frames: the deepest first.
    """
    for depth, frame in enumerate(frames[:-1]):
        if _HOOK.fullmatch(_function(frame)) and _origin(frame.file)[0] == "program":
            is_called_by_package = _origin(frames[depth + 1].file)[0] == "package"
            return (lines_of_program(frames[: depth + 1])[0], frame.name) if is_called_by_package else None
    return None


def in_hook_of_module(frames: Sequence[Frame]) -> Call | None:
    """Return the program's line in a function that a module of torch calls, other than `forward`: a hook; None outside
    of one.

    Args:
        frames: the deepest first.
    """
    for frame, caller in pairwise(frames):
        if caller.file.endswith(MODULE) and _origin(frame.file)[0] == "program":
            return None if _function(frame) in _FORWARD else Call(frame.file, frame.line)
    return None


def below_fetch(frames: Sequence[Frame]) -> list[Frame] | None:
    """Return the frames of a dataloader worker below torch's fetch: of the dataset, or of what collates.

    Args:
        frames: the deepest first; so is the result. None: the worker is not in a fetch.
    """
    depth = next((at for at, frame in enumerate(frames) if frame.file.endswith(_FETCH)), None)
    return None if depth is None else list(frames[:depth])


def converting_lists(frames: Sequence[Frame], call_at: Callable[[str, int], str]) -> Frame | None:
    """Return the frame of a package's function that makes a batch, if that is of lists of numbers; None: it is not.

    Tensors are stacked by `collate_tensor_fn`. A single number of each sample, its label, takes no time.

    Args:
        frames: below a fetch, the deepest first.
        call_at: see `source_lines.SourceLines.call`.
    """
    innermost = frames[0] if frames else None
    if innermost is None:
        return None
    function = f"{innermost.file} {innermost.name}"
    if _COLLATES_ANYTHING.search(function):
        return innermost if call_at(innermost.file, innermost.line) else None
    return innermost if _COLLATES_LISTS.search(function) else None


def in_linear_layer(frames: Sequence[Frame]) -> bool:
    """Whether the innermost line of the program runs operations itself, or a linear layer, but no other module.

    Args:
        frames: the deepest first.
    """
    depth = _innermost(frames)
    return depth is not None and all(frame.file.endswith(_LINEAR) for frame in frames[:depth])


def waits_for_lock(frames: Sequence[Frame]) -> bool:
    """Whether a stack, the deepest frame first, is in a lock that several processes share."""
    return any(_LOCK.match(frame.file) for frame in frames)


def is_outside_compute(call: Call, phase: str) -> bool:
    """Whether a sample in a phase shows a call that is no part of the model's own compute.

    Args:
        call: what the sample is in.
        phase: of `samplers.phases`.
    """
    if call.origin in ("torch", "package") and call.name.rpartition(".")[2] in _GATHERING:
        return phase != "startup" and not call.in_model
    if phase not in ("forward", "backward", "optimizer", "other", "unsettled", "validation"):
        return False  # the others have rules of their own
    if call.origin == "python":
        return _ANSWERS.fullmatch(call.name) is None
    if call.origin == "torch":
        return call.name.rpartition(".")[2] in _TORCH_CALLS
    is_of_package = call.origin == "package" and on_the_host(call.name)
    return is_of_package and not call.within_torch and not call.in_function


def on_the_host(function: str) -> bool:
    """Whether a function, such as `numpy.percentile`, is of a package that does not compute with tensors."""
    return _ON_THE_HOST.fullmatch(function) is not None


def of_metrics(function: str) -> bool:
    """Whether a function is one of metrics, which belong in the validation and after it."""
    return _METRICS.match(function) is not None


def trains_elsewhere(phase: str, frames: Sequence[Frame]) -> bool:
    """Whether a sample of the main thread shows that another one trains: in backward there is always torch's code."""
    return phase == "backward" and not any(_origin(frame.file)[0] == "torch" for frame in frames)


def in_save(frames: Sequence[Frame]) -> bool:
    """Whether a stack is in a function that saves checkpoints, by its name."""
    return any(_SAVES.fullmatch(_function(frame)) for frame in frames)


def spans_steps(call: Call, phase: str) -> bool:
    """Whether a sample shows that a call of a package contains the training loop: `trainer.fit(model)`. Not the loss of
    a Trainer, which the program's own calls."""
    is_loss = call.name.endswith(".compute_loss")
    return call.origin == "package" and call.within_torch and phase in _OF_THE_MODEL and not is_loss


def _model_call(frames: Sequence[Frame]) -> Frame:
    """The innermost line of the program that is not in a module's forward: one line, however large the model is."""
    outside = frames[0]
    for frame in reversed(frames):
        if (origin := _origin(frame.file)[0]) == "torch":
            break
        if origin == "program":
            outside = frame
    return outside


def _innermost(frames: Sequence[Frame]) -> int | None:
    """The index of the program's innermost frame; None: it has none."""
    return next((depth for depth, frame in enumerate(frames) if _origin(frame.file)[0] == "program"), None)


@lru_cache(maxsize=4096)  # a sample asks several times for each of its frames, and most samples have the same
def _origin(file: str) -> tuple[Origin, str]:
    """Return whose code a file is, and its path below Python's or the packages' directory."""
    for origin, pattern in _ORIGINS:
        if found := pattern.match(file):
            return origin, found.groupdict().get("module") or ""
    return "program", ""


def _function(frame: Frame) -> str:
    return frame.name.rpartition(".")[2]


def _dotted(module: str, function: str) -> str:
    """`json/__init__.py` and `dump` are `json.dump`; private modules of a package are left out."""
    package, *parts = module.removesuffix(".py").removesuffix(">").split("/")
    return ".".join([package, *(part for part in parts if part[:1] != "_"), function])
