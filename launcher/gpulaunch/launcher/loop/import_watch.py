"""Watches in the fork server what an import reads and changes: variables, packages, the environment."""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import warnings
from collections.abc import Generator
from types import FrameType
from typing import Any

from gpulaunch.launcher.loop.preload_finder import Package, package_of, set_warning_filters


class _Watched(type(os.environ)):  # type: ignore[misc]
    """os.environ that records which names are read, and by which package."""

    watch: Watch  # of the import in progress: there is one os.environ

    def __getitem__(self, key: str) -> str:
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        if caller.f_code.co_name != "__iter__":  # of items() and values(), where __iter__ below has reported all
            _Watched.watch.asks(caller, key)
        value: str = super().__getitem__(key)
        return value

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            _Watched.watch.asks(sys._getframe(1), key)  # pyright: ignore[reportPrivateUsage]
        return bool(super().__contains__(key))

    def __iter__(self) -> Any:
        _Watched.watch.asks(sys._getframe(1), None)  # pyright: ignore[reportPrivateUsage]
        return super().__iter__()


class Watch:
    """Everything observed of the packages imported so far."""

    def __init__(self) -> None:
        self.packages: dict[str, Package] = {}
        self.asked: set[str] = set()
        """What the import in progress has read, for any package."""
        self._torch_before: bool | None = None

    def package(self, name: str) -> Package:
        """The record of a package."""
        if name not in self.packages:
            self.packages[name] = Package(torch_before=self._torch_before)
        return self.packages[name]

    def asks(self, frame: FrameType | None, variable: str | None) -> None:
        """A frame reads a variable, or all of them (None)."""
        if variable is not None:
            self.asked.add(variable)
        while frame is not None:
            name = package_of(str(frame.f_globals.get("__name__", "")))
            if name:
                if variable is None:
                    self.package(name).asked_all = True
                else:
                    self.package(name).asked.add(variable)
                return
            frame = frame.f_back

    @contextlib.contextmanager
    def importing(self, name: str, *, keeps: bool) -> Generator[None]:
        """Watch the import of one package; its changes to the environment and the warning filters are undone.

        `keeps`: they are applied again when the package is provided.
        """
        before, filters_before = dict(os.environ), list(warnings.filters)
        self._torch_before = None if name == "torch" else "torch" in sys.modules
        plain, plain_import = os.environ.__class__, builtins.__import__

        def watched_import(name: str, *args: Any, **named: Any) -> Any:
            # args: globals, locals, fromlist, level
            level = args[3] if len(args) > 3 else named.get("level", 0)
            if level == 0 and (other := package_of(name)):
                names = args[0] if args else named.get("globals")
                importer = package_of(str(names.get("__name__", ""))) if names else ""
                if importer != other:
                    self.package(other)
                    if importer:
                        self.package(importer).needs.add(other)
            return plain_import(name, *args, **named)

        self.asked.clear()
        self.package(name)
        _Watched.watch = self
        os.environ.__class__ = _Watched
        builtins.__import__ = watched_import
        try:
            yield
        finally:
            builtins.__import__ = plain_import
            os.environ.__class__ = plain
            for loaded in list(sys.modules):
                if other := package_of(loaded):
                    self.package(other)
            self.packages[name].filters = [each for each in warnings.filters if each not in filters_before]
            set_warning_filters(filters_before)
            sets = self.packages[name].sets
            for variable in before.keys() | os.environ.keys():
                if os.environ.get(variable) != before.get(variable):
                    if keeps:
                        sets[variable] = os.environ.get(variable)
                    if variable in before:
                        os.environ[variable] = before[variable]
                    else:
                        del os.environ[variable]
