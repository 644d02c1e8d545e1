"""Hides preloaded packages from a rank's `sys.modules` until its program imports them.

The fork server watches its imports (`import_watch.py`) and puts what came from outside the standard library here,
package by package. In a rank, a finder hands a package out, with all that its import had brought, when the program
imports it, and only if importing it now would give the same result: found at the same place, by the same finders, and
with unchanged values of the environment variables that it read. Otherwise the rank restarts as a plain interpreter
(`restart_plain.py`).

Standard library only; runs in the fork server and in ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_bootstrap: Any = importlib._bootstrap  # pyright: ignore[reportAttributeAccessIssue]

# Read in C while torch, or a library that it loads, is imported, so invisible from Python; variables of these
# families that are read only later count as read then, too.
FAMILIES = (
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_", "NUMEXPR_", "NPY_"),
    *("TORCH", "PYTORCH_", "ATEN_", "C10_", "CAFFE2_", "KINETO_", "DNNL_", "ONEDNN_", "TRITON_"),
    *("NCCL_", "GLOO_", "UCC_", "UCX_", "CUDA_", "CUDNN_", "CUBLAS_", "HIP_", "ROCR_", "HSA_", "XLA_"),
)
READ_LATER = (
    *("TORCH_NCCL_", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST", "TORCHELASTIC_"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_NVML_BASED_CUDA_CHECK"),
)
# They iterate over all variables at import time, for those that begin with their name (tqdm.utils.envwrap,
# fsspec.config.set_conf_env). For any other package that does so, nothing is known.
_BY_ITS_NAME = frozenset({"tqdm", "fsspec"})

_ASKS_FOR_TORCH = re.compile(
    rb"[\"']torch[\"']\s+(?:not\s+)?in\s+(?:sys\.)?modules|modules(?:\.get\(|\[)[\"']torch[\"']"
)
_CHECKPOINT = "gpulaunch.checkpoint"


def package_of(name: str) -> str:
    """The third-party package of a module, or "" for modules of Python, the program, and gpulaunch.

    `gpulaunch.checkpoint` counts as one: it imports torch.
    """
    top = name.partition(".")[0]
    if top == "gpulaunch":
        return _CHECKPOINT if name == _CHECKPOINT or name.startswith(f"{_CHECKPOINT}.") else ""
    if top in sys.stdlib_module_names or top in ("__main__", "__mp_main__") or top.startswith("_sysconfigdata"):
        return ""
    return top


@dataclass
class Package:
    """What was observed of one package during its import."""

    modules: dict[str, ModuleType] = field(default_factory=dict[str, ModuleType])
    needs: set[str] = field(default_factory=set[str])
    """Packages that it imported."""
    asked: set[str] = field(default_factory=set[str])
    """Environment variables that it read."""
    asked_all: bool = False
    """It read all of them."""
    sets: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """Its import's changes to the environment; None: deleted."""
    origin: object = None
    native: bool = False
    """It has compiled code, which a process loads once."""
    filters: list[Any] = field(default_factory=list[Any])
    """Warning filters that its import put in front."""
    loggers: list[logging.Logger] = field(default_factory=list[logging.Logger])
    """The loggers of its name that were not disabled."""
    handed_out: bool = False
    torch_before: bool | None = None
    """Whether torch was in sys.modules when its import began; None: imported by torch itself."""


class _Loader:
    """Replaces the loader in another finder's spec: the import gets the preloaded module."""

    def __init__(self, preload_finder: PreloadFinder, name: str, module: Any, real: Any) -> None:
        self._preload_finder, self._name, self._module, self._real = preload_finder, name, module, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    # For isinstance().
    __class__ = property(lambda self: type(self._real))  # pyright: ignore

    def create_module(self, _: ModuleSpec) -> Any:
        """The module itself; the import machinery temporarily gives it another __spec__."""
        self._preload_finder.check(self._name)
        self._spec = getattr(self._module, "__spec__", None)
        self._preload_finder.hand_out(self._name)
        return self._module

    def exec_module(self, module: Any) -> None:
        """Nothing is executed."""
        with contextlib.suppress(AttributeError):
            module.__spec__ = self._spec

    def load_module(self, name: str) -> Any:
        """The loader API of Python before 3.4."""
        return importlib.import_module(name)


class PreloadFinder:
    """A finder for sys.meta_path, before all others.

    Threads import concurrently, each under the lock of another module, and a module that enters sys.modules while
    `importlib._bootstrap._find_spec` looks for it is executed once more. So a package is provided under its lock, its
    submodules before itself, since no import looks for a submodule of a missing package.
    """

    def __init__(self, packages: Mapping[str, Package]) -> None:
        self._packages = dict(packages)
        self._modules: dict[str, Any] = {}  # also those already provided: a thread may still be searching
        self._owner: dict[str, str] = {}  # of those that are left
        self._expected: dict[str, str] = {}
        self._hooks: list[Any] = []
        self._pid = 0
        self._std: tuple[Any, Any] = (None, None)
        self._again: Callable[[list[str], str], None] | None = None
        self._on_torch: Callable[[], None] | None = None

    # -- in the fork server

    def fill(self, keep: frozenset[str]) -> None:
        """Remove from sys.modules what can be provided again, except `keep`, and become the first finder."""
        for name, package in self._packages.items():
            package.modules, package.loggers, package.handed_out = {}, [], False
            package.origin = self._origin(name)
        for module_name, module in list(sys.modules.items()):
            owner = self._packages.get(package_of(module_name))
            # A module that no import statement could find was made by its package: Cython's, torch's remote one.
            if owner is None or owner.origin is None or module_name in keep:
                continue
            owner.modules[module_name] = module
            owner.native |= str(getattr(module, "__file__", "") or "").endswith(".so")
        for logger_name, logger in logging.Logger.manager.loggerDict.items():
            owner = self._packages.get(package_of(logger_name))
            if owner is not None and isinstance(logger, logging.Logger) and not logger.disabled:
                owner.loggers.append(logger)
        self._packages = {name: package for name, package in self._packages.items() if package.modules}
        for name, package in self._packages.items():
            self._modules.update(package.modules)
            for module_name in package.modules:
                del sys.modules[module_name]
                self._owner[module_name] = name
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                with contextlib.suppress(AttributeError):
                    delattr(sys.modules[parent], child)
        self._filters = list(warnings.filters)
        sys.meta_path.insert(0, self)  # pyright: ignore[reportArgumentType]

    def empty(self) -> None:
        """Restore everything."""
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
        set_warning_filters(self._filters)
        for package in self._packages.values():
            sys.modules.update(package.modules)

    def module(self, name: str) -> Any:
        """A module, wherever it is."""
        return self._modules.get(name) or sys.modules.get(name)

    # -- in a rank

    def arm(
        self, expected: Mapping[str, str], *, again: Callable[[list[str], str], None], on_torch: Callable[[], None]
    ) -> None:
        """Activate the finder in this process.

        Args:
            expected: the environment in which the packages' import would have given the same result.
            again: called with the packages that cannot be provided, and why; returns only if it failed.
            on_torch: called when torch has been provided.
        """
        self._expected, self._again, self._on_torch = dict(expected), again, on_torch
        self._hooks = self.import_hooks()
        self._std = sys.stdout, sys.stderr
        self._pid = os.getpid()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of another finder, with a loader that hands out the preloaded module."""
        module = self._modules.get(name)
        if module is None or target is not None:  # target: importlib.reload()
            return None
        owner = self._owner.get(name)
        if owner is None and sys.modules.get(name) is not module:
            return None  # the program has deleted or replaced it
        spec = self._search(name, path)
        if spec is None:
            return None
        if owner is not None and self._pid == os.getpid() and self._is_another(owner) and self._forget(owner):
            return None
        spec.loader = _Loader(self, name, module, spec.loader)
        return spec

    def check(self, name: str) -> None:
        """Restart the rank if an import now would give another result; returns if it has to stay as it is."""
        owner = self._owner.get(name)
        if owner is not None and self._pid == os.getpid() and self._again is not None:
            why = self._why_not(owner)
            if why:
                self._again(*why)

    def hand_out(self, name: str) -> None:
        """Put a module's package, and what its import had brought, into sys.modules."""
        names = self._closure(self._owner.get(name, ""))
        with contextlib.ExitStack() as locked:
            for each in names:
                with contextlib.suppress(_bootstrap._DeadlockError):  # as circular imports do
                    locked.enter_context(_bootstrap._ModuleLockManager(each))
            self._hand_out(names)
        if "torch" in names and self._on_torch is not None:
            self._on_torch()

    def _hand_out(self, names: list[str]) -> None:
        for each in names:
            package = self._packages[each]
            for module_name, module in sorted(package.modules.items(), reverse=True):
                sys.modules.setdefault(module_name, module)
                self._owner.pop(module_name, None)
            parent, _, child = each.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, package.modules[each])
            for variable, value in package.sets.items():
                _set(os.environ, variable, value)
                _set(self._expected, variable, value)
            if package.filters:
                set_warning_filters(
                    [*package.filters, *(one for one in warnings.filters if one not in package.filters)]
                )
            for logger in package.loggers:  # logging.config disables existing loggers
                logger.disabled = False
                self._log_to_what_is_there(logger)
            package.handed_out = True

    def _log_to_what_is_there(self, logger: logging.Logger) -> None:
        """The program may have replaced sys.stdout and sys.stderr."""
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                for old, new in zip(self._std, (sys.stdout, sys.stderr), strict=True):
                    if None not in (old, new) and handler.stream is old is not new:  # None: of one not opened yet
                        handler.stream = new
                        break

    def _closure(self, name: str) -> list[str]:
        """A package and the preloaded packages that it imported, transitively."""
        found: list[str] = []
        left = [name]
        while left:
            one = left.pop()
            package = self._packages.get(one)
            if package is not None and not package.handed_out and one not in found:
                found.append(one)
                left += package.needs
        return found

    def _with(self, name: str) -> list[str]:
        """The preloaded packages that cannot be provided without this one."""
        return sorted(each for each in self._packages if name in self._closure(each))

    def _forget(self, name: str) -> bool:
        """Leave a name to the other finders, unless compiled code, which a process loads once, prevents it.

        The package is kept, so that packages that need it can detect this.
        """
        package = self._packages[name]
        if package.native:
            return False
        for module_name in package.modules:
            self._owner.pop(module_name, None)
            self._modules.pop(module_name, None)
        return True

    def _is_another(self, name: str) -> bool:
        """Whether the program has, or would find, another package of this name."""
        package = self._packages[name]
        # A module may be None, or a substitute made by the program.
        loaded = any(sys.modules.get(each, mine) is not mine for each, mine in package.modules.items())
        return loaded or self._origin(name) != package.origin

    def _why_not(self, wanted: str) -> tuple[list[str], str] | None:
        """Why an import now would give another result, and which packages that affects; None: hand it out."""
        changed = {
            name
            for name in self._expected.keys() | os.environ.keys()
            if self._expected.get(name) != os.environ.get(name)
        }
        if [*map(id, self.import_hooks())] != [*map(id, self._hooks)]:
            return self._with(wanted), f"an import hook was installed before the import of {wanted}"
        for name in self._closure(wanted):
            package = self._packages[name]
            if self._is_another(name):
                return self._with(name), f"another {name} is found first"
            seen = {variable for variable in changed if concerns(name, package, variable)}
            if seen:
                were = "was" if len(seen) == 1 else "were"
                return self._with(name), f"{', '.join(sorted(seen))} {were} set before the import of {name}"
            before = package.torch_before
            if before is not None and before != ("torch" in sys.modules) and _looks_for_torch(package):
                return self._with(name), f"{name} depends on whether torch is imported before it"
        return None

    def import_hooks(self) -> list[Any]:
        """The hooks that an import calls before, or while, it searches sys.path."""
        finders: list[Any] = []
        for finder in sys.meta_path:
            if finder is not self:
                finders.append(finder)
            if finder is PathFinder:
                break
        return finders + sys.path_hooks

    def _search(self, name: str, path: Any) -> Any:
        """What an import would find now, without this finder. Raises what the program's finders raise."""
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None:
                spec = find(name, path, None)
                if spec is not None:
                    return spec
        return None

    def _origin(self, name: str) -> object:
        """Where a package would be found now; None: nowhere."""
        parent = name.rpartition(".")[0]
        spec = None
        with contextlib.suppress(Exception):
            spec = self._search(name, sys.modules[parent].__path__ if parent else None)
        if spec is None:
            return None
        where = spec.submodule_search_locations
        return spec.origin or (None if where is None else tuple(where))


def concerns(name: str, package: Package, variable: str) -> bool:
    """Whether the import of a package may depend on an environment variable."""
    if variable in package.asked or (
        package.native and variable.startswith(FAMILIES) and not variable.startswith(READ_LATER)
    ):
        return True
    return package.asked_all and (name not in _BY_ITS_NAME or variable.startswith(f"{name.upper()}_"))


def _looks_for_torch(package: Package) -> bool:
    """Whether the source of a package asks whether torch has been imported."""
    for module in package.modules.values():
        path = str(getattr(module, "__file__", "") or "")
        if path.endswith(".py"):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if _ASKS_FOR_TORCH.search(file.read()):
                    return True
    return False


def set_warning_filters(filters: list[Any]) -> None:
    """Replace all warning filters."""
    warnings.filters[:] = filters  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
    with warnings.catch_warnings():
        pass  # so that C and the modules' registries notice


def _set(mapping: Any, name: str, value: str | None) -> None:
    if value is None:
        mapping.pop(name, None)
    else:
        mapping[name] = value
