"""Interprets a stack: whether it waits for other ranks, whether it may take long, and the user's line to show.

Based on names only, so it is a heuristic: it affects wording and time of a report. Actions rest on more.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
from collections.abc import Sequence

from gpulaunch.profiler.stack import Frame

# Where torch.distributed waits for other ranks. Not all of it: `checkpoint` writes files, `rpc` serves,
# `elastic` is another launcher.
_COLLECTIVE = re.compile(
    r"/torch/(distributed/(?!checkpoint/|rpc/|elastic/|launcher/|debug/|run\.py)|nn/parallel/distributed\.py)"
)
# DistributedDataParallel waits for its all-reduce inside the autograd engine, where there are no Python frames.
_BACKWARD = ("/torch/autograd/", {"_engine_run_backward", "backward"})
# Our taps pass calls through to torch: a stack inside a tap is inside that call.
_TAP = re.compile(r"/gpulaunch/profiler/probe/(?P<room>\w+)\.py$")
_WORK_WAIT = Frame("Work.wait", "<C++>/torch/distributed/", 0)
"""What a stack would have on top if C++ had frames: the calls with a tap in `collectives` that are in C++."""
# These wait for peers that the program chooses, including processes outside of the job, and for a store.
_SET_UP = frozenset({"init_process_group", "new_group", "split_group", "init_device_mesh", "rendezvous"})
_WRAPPERS = frozenset({"wrapper", "decorate_context", "_wrapped_call_impl", "_call_impl", "__call__", "_fn", "inner"})

# Names that programs use for work that may take minutes between two steps; `train_and_evaluate` is the whole program.
_PAUSES = frozenset(
    {
        *("val", "valid", "validate", "validation", "eval", "evaluate", "evaluation", "test", "predict", "generate"),
        *("save", "saving", "checkpoint", "checkpointing", "ckpt", "export", "upload", "push", "download", "sample"),
        *("log", "logging", "report", "compile", "warmup", "profile"),
    }
)
_WHOLE = frozenset({"train", "training", "trainer", "fit", "main"})
_PAUSE_FILES = re.compile(
    r"/torch/(serialization|distributed/checkpoint/|_dynamo/|_inductor/|utils/cpp_extension)"
    r"|/(safetensors|fsspec|wandb|mlflow|tensorboard|huggingface_hub|boto\w*|triton|filelock)/"
)
_PROMPT_FILES = re.compile(r"/lib(64)?/python3[^/]*/(pdb|bdb|code)\.py$|/(IPython/terminal|ipdb|debugpy|_?pydevd\w*)/")
_LEAVING = "/gpulaunch/launcher/loop/rank_end.py"
_DEVICE_CALLS = frozenset(
    {
        *("item", "cpu", "cuda", "to", "numpy", "tolist", "synchronize", "nonzero", "copy_", "wait"),
        *("float", "int", "bool", "print"),  # of a tensor on a GPU; otherwise they take no time
    }
)

_NOT_USERS = re.compile(
    r"^<|/site-packages/|/dist-packages/|/lib/python3[^/]*/|/gpulaunch/(launcher|profiler|exporters)/"
)
# Frames of Python, torch and gpulaunch: a thread with only these does no work of the program.
_NOT_PROGRAMS = re.compile(
    r"^<frozen |/(site|dist)-packages/(torch|gpulaunch)/|/gpulaunch/(launcher|profiler|exporters)/"
    r"|/lib(64)?/python3[^/]*/(?!(site|dist)-packages/)"
)
# Between these and the fetch only polling happens: a different line among them is no progress.
_POLLING = re.compile(r"/torch/utils/data/dataloader\.py$")

_LINE_CAP = 60
_SOURCE_CAP_BYTES = 2 << 20
_SOURCE_S = 1.0


def without_taps(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the stack as it would be without the profiler; the profiler's own work stays.

    A wait for other ranks in C++ that the program called directly is visible only by the tap: that is kept as the call.
    """
    kept = tuple(frame for frame in frames if not _tap_of(frame))
    waits = bool(frames) and _tap_of(frames[0]) == "collectives" and not (kept and _COLLECTIVE.search(kept[0].file))
    return (_WORK_WAIT, *kept) if waits else kept


def _tap_of(frame: Frame) -> str:
    """The probe module that a tap belongs to; "" if it is none."""
    found = _TAP.search(frame.file) if _short(frame).startswith("tapped") else None
    return found["room"] if found else ""


def waits_in(frames: Sequence[Frame]) -> str:
    """Return the name of the call in which this stack waits for other ranks, or ""."""
    if not frames:
        return ""
    top = frames[0]
    if top.file.find(_BACKWARD[0]) >= 0 and _short(top) in _BACKWARD[1]:
        return "backward"
    if top == _WORK_WAIT:
        return top.name
    if not _COLLECTIVE.search(top.file):
        return ""
    return next((_short(frame) for frame in frames if _short(frame) not in _WRAPPERS), _short(top))


def is_set_up(frames: Sequence[Frame]) -> bool:
    """Whether the stack is creating a process group."""
    return any(_short(frame) in _SET_UP and _COLLECTIVE.search(frame.file) for frame in frames)


def waits_for_device(frames: Sequence[Frame]) -> str:
    """Return the name of the call with which this stack waits for its GPU, or ""."""
    if not frames:
        return ""
    if "/torch/cuda/" in frames[0].file and _short(frames[0]) in _DEVICE_CALLS:
        return _short(frames[0])
    return next((call for call in calls_at(frames[0]) if call in _DEVICE_CALLS), "")


def certainly_waits_for_device(frames: Sequence[Frame]) -> bool:
    """Whether that is certain: no other call is on the line, which would look the same from outside."""
    if not waits_for_device(frames):
        return False
    return "/torch/cuda/" in frames[0].file or _DEVICE_CALLS.issuperset(calls_at(frames[0]))


def is_prompt(frames: Sequence[Frame]) -> bool:
    """Whether the stack may be at the prompt of a debugger or shell."""
    return any(_PROMPT_FILES.search(frame.file) for frame in frames)


def is_pause(frames: Sequence[Frame]) -> bool:
    """Whether the stack goes through something that may legitimately take minutes.

    Names count only outside of a dataloader: a dataset's function `sample` is no pause.
    """
    if any(_PAUSE_FILES.search(frame.file) for frame in frames):
        return True
    for frame in comparable(frames):
        words = {word.lower() for word in re.findall("[A-Z]?[a-z]+", _short(frame))}
        if is_users(frame) and words & _PAUSES and not words & _WHOLE:
            return True
    return False


def is_leaving(frames: Sequence[Frame]) -> bool:
    """Whether the program has run to its end, and waits for its threads or its exit functions."""
    return any(frame.file.endswith(_LEAVING) or frame.name == "_shutdown" for frame in frames)


def is_users(frame: Frame) -> bool:
    """Whether a frame is in the user's own files, not in Python, a package or gpulaunch."""
    return _NOT_USERS.search(frame.file) is None


def is_programs(frame: Frame) -> bool:
    """Whether a frame is in the program or a package that it uses, not in Python, torch or gpulaunch."""
    return _NOT_PROGRAMS.search(frame.file) is None


def comparable(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the part of a stack that changes only with progress."""
    polling = [index for index, frame in enumerate(frames) if _POLLING.search(frame.file)]
    return tuple(frames[polling[-1] :] if polling else frames)


def user_frame(frames: Sequence[Frame]) -> tuple[Frame | None, str]:
    """Return the deepest frame of the user's code, and the function that it called, if that has a frame."""
    for index, frame in enumerate(frames):
        if is_users(frame):
            deeper = [_short(one) for one in reversed(frames[:index]) if _short(one) not in _WRAPPERS]
            return frame, deeper[0] if deeper else ""
    return None, ""


def describe(frames: Sequence[Frame]) -> str:
    """Say where a stack is, in the user's terms: `train.py:88 open()`."""
    frame, called = user_frame(frames)
    if frame is None:
        if not frames:
            return "an unknown place"
        return f"{_place(frames[0])} {_short(frames[0])}()"
    if called:
        return f"{_place(frame)} {called}()"
    calls = calls_at(frame)
    if len(calls) == 1:
        return f"{_place(frame)} {calls[0]}()"
    line = _line(frame)
    return f"{_place(frame)} `{line}`" if line else f"{_place(frame)} in {_short(frame)}()"


@functools.lru_cache(maxsize=256)
def calls_at(frame: Frame) -> tuple[str, ...]:
    """Return the names called on the line of a frame, from its source; a C function has no frame."""
    import ast

    try:
        tree = ast.parse(_source(frame.file))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno <= frame.line <= (node.end_lineno or node.lineno):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if name:
                found.append(((node.end_lineno or node.lineno) - node.lineno, str(name)))
    smallest = min((span for span, _ in found), default=0)
    return tuple(dict.fromkeys(name for span, name in found if span == smallest))


@functools.lru_cache(maxsize=64)
def _source(path: str) -> str:
    """The text of a Python file, "" if not available at once: it may lie on the storage that the rank hangs on."""
    import threading

    read: list[str] = []

    def try_to_read() -> None:
        with contextlib.suppress(OSError):
            what = os.stat(path)
            if stat.S_ISREG(what.st_mode) and what.st_size <= _SOURCE_CAP_BYTES:
                with open(path, encoding="utf-8", errors="replace") as file:
                    read.append(file.read(_SOURCE_CAP_BYTES))

    reader = threading.Thread(target=try_to_read, daemon=True)
    reader.start()
    reader.join(_SOURCE_S)
    return read[0] if read and path.endswith(".py") else ""


def _line(frame: Frame) -> str:
    lines = _source(frame.file).splitlines()
    text = lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""
    return text if len(text) <= _LINE_CAP else f"{text[:_LINE_CAP]}..."


def _place(frame: Frame) -> str:
    return f"{os.path.basename(frame.file)}:{frame.line}"


def _short(frame: Frame) -> str:
    """The name without class or enclosing function: py-spy gives qualified names, faulthandler plain ones."""
    return frame.name.rpartition(".")[2]
