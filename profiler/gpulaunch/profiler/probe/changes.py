"""Applies the change of a trial (`gpulaunch tune`) inside the rank, without touching the program.

GPULAUNCH_TUNE holds it, see `asked`. Arguments are changed where the program constructs a DataLoader or a
DistributedDataParallel; torch's settings are set once, so a program that sets them later wins, except for the number of
threads: nearly all that set it do so later.

The fact "changes" has what was applied, `{"train.py:41 num_workers": [old, new]}`, and what was refused, with the
reason. A setting whose place the program has not reached is in neither. If a constructor raises because of a changed
argument, the program gets that exception as from its own call: this is the result of the trial.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.probe.asked import MOST_REASON, Settings, known_arguments, loader_arguments, parsed
from gpulaunch.profiler.probe.facts import flush, set_fact
from gpulaunch.profiler.probe.sites import line_of_user
from gpulaunch.profiler.probe.taps import Undo, exclude_from_compile, put
from gpulaunch.profiler.probe.user_signals import raised_by_program

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.loaders import Loaders
    from gpulaunch.profiler.probe.state import Probe

_MOST_DATASETS: Final = 256

_collect: Final = gc.collect
"""Under another name: the probe reports lines that call `gc.collect`, and this one is not the program's."""

_Plan = tuple[str, Settings, dict[str, str]]
"""Of a constructor's call: its name in the record, the arguments to change, and refused ones with the reasons."""


class Changes:
    """The change of this rank's trial, and the record of what came of it."""

    def __init__(self, text: str) -> None:
        """Read the change from the value of the variable."""
        self._asked = parsed(text)
        self._applied: dict[str, list[Any]] = {}
        self._refused = self._asked.refused
        self._pid = os.getpid()
        self._tell()

    def install(self, probe: Probe, torch: Any, undo: Undo) -> None:
        """Set torch's settings, and place the taps for the rest, except that of DataLoader: see `tap_loader`."""
        for name, value in self._asked.torch.items():
            try:
                before, now = _set_in_torch(torch, name, value)
            except Exception as error:
                self.refused({f"torch {name}": repr(error)})
            else:
                if now == value:
                    self.applied({f"torch {name}": [before, now]})
                    if name == "num_threads":
                        self._keep_threads(torch, undo)
                else:
                    self.refused({f"torch {name}": f"torch has set it to {now!r}"})
        if self._asked.ddp:
            try:
                parallel = importlib.import_module("torch.nn.parallel.distributed").DistributedDataParallel
            except (ImportError, AttributeError) as error:
                self.refused({f"ddp {name}": repr(error) for name in self._asked.ddp})
            else:
                put(parallel, "__init__", self.tap_ddp(torch, parallel.__init__), undo)
        if self._asked.gc_freeze:
            self._freeze_after_a_step(probe, torch, undo)

    def is_here(self) -> bool:
        """True in the rank itself; nothing is applied in its forked children, such as dataloader workers."""
        return os.getpid() == self._pid

    def applied(self, changes: Mapping[str, list[Any]]) -> None:
        """Record the old and the new value of settings. If one is set again, the first old value is the program's."""
        for name, values in changes.items():
            self._applied.setdefault(name, values)
        self._tell()

    def refused(self, reasons: Mapping[str, str]) -> None:
        """Record settings that could not be applied."""
        for name, why in reasons.items():
            self._refused.setdefault(name, why[:MOST_REASON])
        self._tell()

    def _tell(self) -> None:
        told = None
        # If two threads record at once, the one with older data may be the later: so each checks again afterwards.
        while told != (known := {"applied": dict(self._applied), "refused": dict(self._refused)}):
            set_fact("changes", known)
            told = known

    def tap_loader(self, torch: Any, loaders: Loaders, original: Any) -> Callable[..., None]:
        """`DataLoader.__init__` with the arguments that are asked for at the line of the program that calls it.

        Args:
            torch: the module.
            loaders: knows the program's line for a DataLoader that a package constructs from the program's.
            original: the constructor.
        """
        datasets: dict[int, tuple[weakref.ref[Any], str]] = {}

        def plan(given: Settings) -> _Plan | None:
            dataset = given["dataset"]
            line, by_package = line_of_user()
            found = self._asked.at(loaders.line_of(dataset, line, by_package=by_package))
            if found is not None:
                # Lightning wraps the constructor in the program's own call, too, so that `loaders` takes this for a
                # package's; from the arguments that it has noted there it constructs another DataLoader elsewhere.
                with suppress(TypeError):  # there are no weak references to it
                    if len(datasets) < _MOST_DATASETS:
                        datasets[id(dataset)] = weakref.ref(dataset), found[0]
            elif by_package and id(dataset) in datasets:
                same, key = datasets[id(dataset)]
                found = self._asked.at(key) if same() is dataset else None
            if found is None:
                return None
            iterable = isinstance(dataset, torch.utils.data.IterableDataset)
            return found[0], *loader_arguments(found[1], given, iterable=iterable)

        return _tap_init(self, torch, original, plan)

    def tap_ddp(self, torch: Any, original: Any) -> Callable[..., None]:
        """`DistributedDataParallel.__init__` with the arguments that are asked for."""
        return _tap_init(self, torch, original, lambda given: ("ddp", *known_arguments(self._asked.ddp, given)))

    def _keep_threads(self, torch: Any, undo: Undo) -> None:
        """Have no effect of `torch.set_num_threads` in the program; dataloader workers call it, too, for themselves."""
        original = torch.set_num_threads

        @functools.wraps(original)
        def tapped_set_num_threads(threads: int) -> None:
            if not self.is_here():
                original(threads)

        put(torch, "set_num_threads", tapped_set_num_threads, undo)

    def _freeze_after_a_step(self, probe: Probe, torch: Any, undo: Undo) -> None:
        """Have the collector frozen when the first step has ended: at once if an optimizer ends it, else up to a second
        later."""
        is_compiling = torch.compiler.is_dynamo_compiling
        frozen = False

        def look() -> None:
            nonlocal frozen
            if frozen or not probe.machine.totals[0] or not self.is_here():
                return
            frozen = True
            _collect()
            gc.freeze()
            self.applied({"gc_freeze": [False, True]})
            flush()  # a short trial ends before the next second

        def after_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if frozen or is_compiling():
                return
            try:
                look()
            except Exception as error:
                if raised_by_program(error):
                    raise
                self.refused({"gc_freeze": repr(error)})

        exclude_from_compile(torch, after_step, ours=[look])
        undo.append(probe.each_second(Hook.FACTS, look))
        with suppress(ImportError, AttributeError):  # without it, only once a second
            optimizer = importlib.import_module("torch.optim.optimizer")
            undo.append(optimizer.register_optimizer_step_post_hook(after_step).remove)


def _set_in_torch(torch: Any, name: str, value: Any) -> tuple[Any, Any]:
    """Set one of torch's settings; its value before and after."""
    if name == "cudnn_benchmark":
        cudnn = torch.backends.cudnn
        before, cudnn.benchmark = cudnn.benchmark, value
        return before, cudnn.benchmark
    before = getattr(torch, f"get_{name}")()
    getattr(torch, f"set_{name}")(value)
    return before, getattr(torch, f"get_{name}")()


def _tap_init(
    changes: Changes, torch: Any, original: Any, plan: Callable[[Settings], _Plan | None]
) -> Callable[..., None]:
    """A constructor with other arguments.

    Args:
        changes: for the record.
        torch: the module.
        original: the constructor.
        plan: called before each call with the values of all arguments by name; None: this call stays as it is.
    """
    is_compiling = torch.compiler.is_dynamo_compiling
    signature = inspect.signature(original)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}

    @functools.wraps(original)
    def tapped_init(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_compiling() or not changes.is_here():
            original(self, *args, **kwargs)
            return
        applied: dict[str, list[Any]] = {}
        bound = None
        try:
            bound = signature.bind(self, *args, **kwargs)
            given = {**defaults, **bound.arguments}
            planned = plan(given)
            if planned is not None:
                place, new, refused = planned
                changes.refused({f"{place} {name}": why for name, why in refused.items()})
                record = {f"{place} {name}": [_plain(given[name]), value] for name, value in new.items()}
                bound.arguments.update(new)
                args, kwargs, applied = bound.args[1:], bound.kwargs, record
        except Exception as error:
            if raised_by_program(error):
                raise
            if bound is not None:  # else the program's own arguments are wrong, and its call raises, too
                changes.refused({original.__qualname__: repr(error)})
        try:
            original(self, *args, **kwargs)
        except Exception as error:
            changes.refused(dict.fromkeys(applied, f"the constructor raised {error!r}"))
            raise
        if applied:
            changes.applied(applied)

    exclude_from_compile(torch, tapped_init)
    return tapped_init


def _plain(value: Any) -> Any:
    """A value as JSON: that of an argument, or the name of a context of multiprocessing."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    start_method = getattr(value, "get_start_method", None)
    return str(start_method(allow_none=True)) if start_method is not None else type(value).__name__
