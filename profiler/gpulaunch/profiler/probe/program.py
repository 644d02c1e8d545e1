"""Records the parts of a program's setup that rules need: its dataloaders, its precision, DataParallel, its device.

Constructors are tapped; the rest is polled before the facts are written, once a second.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.gradients import SHARDED, groups_of_optimizers, optimizers
from gpulaunch.profiler.probe.loaders import tap_init
from gpulaunch.profiler.probe.sites import line_of_user
from gpulaunch.profiler.probe.taps import HookError, Undo, exclude_from_compile, put
from gpulaunch.profiler.probe.user_signals import raised_by_program

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.changes import Changes
    from gpulaunch.profiler.probe.state import Probe


_LOOK_AT: Final = 64
"""Maximum of parameters whose dtype is inspected."""


def install(probe: Probe, torch: Any, undo: Undo) -> None:
    """Start to record this program.

    Raises:
        HookError: torch does not look as expected, or there is no directory to write to.
    """
    directory = os.environ.get("GPULAUNCH_CHANNEL_DIR", "")
    if not os.path.isdir(directory):
        raise HookError("GPULAUNCH_CHANNEL_DIR is not a directory")
    path = os.path.join(directory, f"facts-{int(os.environ['RANK'])}.json")
    loader = importlib.import_module("torch.utils.data.dataloader").DataLoader
    parallel = importlib.import_module("torch.nn.parallel.data_parallel").DataParallel
    optimizer = importlib.import_module("torch.optim.optimizer").Optimizer
    autocast = importlib.import_module("torch.amp.autocast_mode").autocast

    here = os.getpid()

    def failed(why: str) -> None:
        if os.getpid() == here:  # a forked child must not write the segment
            probe.unavailable(Hook.FACTS, why)

    program = Program(torch)
    make_loader = _own(loader, "__init__")
    changes = _changes()
    if changes is not None:
        make_loader = changes.tap_loader(torch, probe.loader.loaders, make_loader)
    places = (
        (loader, "__init__", tap_init(torch, probe.loader.loaders, failed, make_loader)),
        (parallel, "__init__", tap_parallel(torch, failed, _own(parallel, "__init__"))),
        (optimizer, "__init__", tap_optimizer(probe, torch, _own(optimizer, "__init__"))),
        (autocast, "__enter__", tap_autocast(torch, program, _own(autocast, "__enter__"))),
    )
    exclude_from_compile(torch, *(tap for _, _, tap in places))
    for owner, name, tap in places:
        put(owner, name, tap, undo)
    facts.start(path, program.look, failed)
    undo.append(facts.stop)
    atexit.register(facts.flush)  # the facts of a short program, or of the last second of a long one
    undo.append(lambda: atexit.unregister(facts.flush))
    if changes is not None:
        changes.install(probe, torch, undo)
    if os.environ.get("GPULAUNCH_TRIAL") and int(os.environ["RANK"]) == 0:
        from gpulaunch.profiler.probe.losses import Losses

        graph = importlib.import_module("torch.autograd.graph")
        Losses(probe, torch).install(importlib.import_module("torch.autograd"), graph, undo)


def _changes() -> Changes | None:
    """What a trial of `gpulaunch tune` changes; None in every other run."""
    text = os.environ.get("GPULAUNCH_TUNE")
    if not text:
        return None
    from gpulaunch.profiler.probe.changes import Changes

    return Changes(text)


def _own(owner: type[Any], name: str) -> Any:
    found = vars(owner).get(name)
    if not isinstance(found, FunctionType):
        raise HookError(f"{owner.__name__}.{name} is not a function")
    return found


class Program:
    """The observable facts of a program that uses this torch."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._device_index = -1
        self._parameters: tuple[str | None, bool] = (None, False)
        self._optimizer_name: str | None = None
        self.autocast: str | None = None
        """The dtype that was last computed in by autocast."""

    def look(self) -> None:
        """Set the facts that can be read at any time."""
        torch = self._torch
        facts.set_fact("torch", str(torch.__version__))
        facts.set_fact("omp_threads", _first_number(os.environ.get("OMP_NUM_THREADS", "")))
        facts.set_fact("torch_threads", int(torch.get_num_threads()))
        facts.set_fact("precision", self._precision())
        self._look_at_device()

    def _precision(self) -> dict[str, Any]:
        self._look_at_parameters()
        parameters, sharded = self._parameters
        matmul = None
        with suppress(RuntimeError):  # if a program mixes torch's older and newer settings, there is no single value
            matmul = str(self._torch.get_float32_matmul_precision())
        return {
            "parameters": parameters,
            "sharded": sharded,
            "optimizer": self._optimizer_name,
            "default": str(self._torch.get_default_dtype()).removeprefix("torch."),
            "autocast": self.autocast or False,
            "matmul": matmul,
        }

    def _look_at_parameters(self) -> None:
        """Note the dtype of most parameters of all optimizers, whether they are parts of larger ones, and which
        optimizer has most of them; LBFGS if it is among them."""
        dtypes, optimizers_by_name = Counter[str](), Counter[str]()
        sharded = False
        # No `__torch_function__` must observe this; that of a parameter of a lazy module would raise.
        with self._torch._C.DisableTorchFunction():
            owned = ((optimizer, each) for optimizer, group in groups_of_optimizers() for each in group["params"])
            for optimizer, parameter in islice(owned, _LOOK_AT):
                elements = int(parameter.numel())
                dtypes[str(parameter.dtype).removeprefix("torch.")] += elements
                optimizers_by_name[type(optimizer).__name__] += elements
                sharded = sharded or type(parameter).__name__ in SHARDED
        if dtypes:  # else the previous value stays: the optimizers no longer exist
            self._parameters = dtypes.most_common(1)[0][0], sharded
            name = optimizers_by_name.most_common(1)[0][0]
            self._optimizer_name = "LBFGS" if "LBFGS" in optimizers_by_name else name

    def _look_at_device(self) -> None:
        cuda = self._torch.cuda
        if not cuda.is_initialized():  # never initialises it
            return
        index = cuda.current_device()
        if index == self._device_index:
            return
        self._device_index = index
        properties = cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))  # torch omits the prefix that NVML uses
        facts.set_fact(
            "device",
            {
                "type": "cuda",
                "index": index,
                "uuid": f"GPU-{uuid}" if uuid and not uuid.startswith(("GPU-", "MIG-")) else uuid or None,
                "name": str(properties.name),
                "capability": [properties.major, properties.minor],
            },
        )


def _first_number(text: str) -> int | None:
    """The threads of the outermost level in OMP_NUM_THREADS ("8" or "8,2")."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdigit() else None


def tap_parallel(torch: Any, failed: Callable[[str], None], original: Any) -> Callable[..., None]:
    """`DataParallel.__init__`, reporting the line that creates one."""
    is_compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(original)
    def tapped_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_compiling():
            try:
                facts.set_fact("dataparallel", line_of_user()[0])
            except Exception as error:
                if raised_by_program(error):
                    raise
                failed(repr(error))
        original(self, *args, **kwargs)

    return tapped_init


def tap_optimizer(probe: Probe, torch: Any, original: Any) -> Callable[..., None]:
    """`Optimizer.__init__`: its parameters are the model's, and have a dtype; and steps will end with it."""
    is_compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(original)
    def tapped_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_compiling():
            with suppress(TypeError):  # a subclass may have slots and no weak references
                optimizers.add(self)
            probe.optimizer_made(id(self))
        original(self, *args, **kwargs)

    return tapped_init


def tap_autocast(torch: Any, program: Program, original: Any) -> Callable[[Any], Any]:
    """`autocast.__enter__`, which may have the same parameters computed in another precision."""
    is_compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(original)
    def tapped_enter(self: Any) -> Any:
        if not is_compiling() and getattr(self, "_enabled", False):
            program.autocast = str(getattr(self, "fast_dtype", "unknown")).removeprefix("torch.")
        return original(self)

    return tapped_enter
