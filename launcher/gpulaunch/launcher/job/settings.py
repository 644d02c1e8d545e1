"""The options of a job, merged: job file < environment < command line, with the source of each value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gpulaunch.launcher.job import jobfile
from gpulaunch.launcher.job.option_table import OPTIONS
from gpulaunch.launcher.job.options import Option, UsageError

T = TypeVar("T")


class Settings:
    """The merged values of all options by name, with their origins, and the program that was named."""

    def __init__(self, given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        self.merged: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self._given = given
        # Inside a rank of another launcher this is what that launcher set for its rank, not an option for us.
        told = {"GPULAUNCH_CHECKPOINT_DIR"} if "GPULAUNCH_CONTROL" in environ else set[str]()
        self._environ = {name: value for name, value in environ.items() if name not in told}
        path = given.get("config") or environ.get("GPULAUNCH_CONFIG")
        self.file = jobfile.read(path) if path else jobfile.JobFile()
        for option in OPTIONS:
            self.merged[option.name], self.origins[option.name] = self._merge(option)
        self.script, self.args = self._script()

    def __getitem__(self, name: str) -> Any:
        return self.merged[name]

    def label(self, name: str) -> str:
        """The name of the option for an error message, spelled as in its source."""
        origin = self.origins[name]
        if origin.startswith("environment "):
            return origin.removeprefix("environment ")
        return f"{origin}: {name}" if self.file.path and origin == self.file.path else f"--{name}"

    def read(self, name: str, convert: Callable[[Any], T]) -> T:
        """The value, converted; an error message is prefixed with the option's name."""
        try:
            return convert(self.merged[name])
        except UsageError as err:
            raise UsageError(f"{self.label(name)}: {err}") from None

    def fields(self) -> dict[str, Any]:
        """What the options fill in of `JobSpec` as they are; `load` adds what depends on more than one of them."""
        return {option.field: self.read(option.name, option.check) for option in OPTIONS if option.field}

    def settle(self, name: str, value: T, origin: str) -> T:
        """Record a value that was not given as such, and its source."""
        self.merged[name], self.origins[name] = value, origin
        return value

    def _merge(self, option: Option) -> tuple[Any, str]:
        if option.dest in self._given:
            return self._given[option.dest], "command line"
        variables = [name for name in option.environment if name in self._environ]
        if len({self._environ[name] for name in variables}) > 1:
            said = " but ".join(f"{name}={self._environ[name]}" for name in variables)
            raise UsageError(f"{said}: two values for --{option.name}; unset one")
        if variables:
            return _convert(option, variables[0], self._environ[variables[0]]), f"environment {variables[0]}"
        if option.dest in self.file.values:
            return _convert(option, f"{self.file.path}: {option.name}", self.file.values[option.dest]), self.file.path
        return option.default, "default"

    def _script(self) -> tuple[str, tuple[str, ...]]:
        if "training_script" in self._given:
            script: str = self._given["training_script"]
            args: list[str] = self._given.get("training_script_args", [])
            return self.settle("program", script, "command line"), tuple(args)
        if self.file.script is not None:
            return self.settle("program", self.file.script, self.file.path), self.file.args
        raise UsageError("no program to run: gpulaunch [options] PROGRAM [arguments] (or `script` in a job file)")


def _convert(option: Option, label: str, value: str | bool) -> object:
    if option.is_flag:
        if isinstance(value, bool):
            return value
        try:
            return bool(int(value))  # as torchrun: any number but zero is true
        except ValueError:
            raise UsageError(f"{label}: expected 0 or 1, got {value!r}") from None
    try:
        return option.convert(str(value))
    except UsageError as err:
        raise UsageError(f"{label}: {err}") from None
