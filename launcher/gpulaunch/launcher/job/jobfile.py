"""Reads the job file: TOML, typed by the option table. Every error is one line that names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpulaunch.launcher.job.option_table import BY_KEY, OPTIONS
from gpulaunch.launcher.job.options import Option, UsageError, did_you_mean

_KINDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "list": "a list",
}
_LAUNCHERS_OWN = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """The content of a job file; values are written as on the command line."""

    path: str = ""
    script: str | None = None
    args: tuple[str, ...] = ()
    values: Mapping[str, str | bool] = field(default_factory=dict[str, "str | bool"])
    """By destination of the option."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])


def read(path: str) -> JobFile:
    """Read and check a job file.

    Raises:
        UsageError: it cannot be read, is not TOML, or a key or type is wrong.
    """
    table = _toml(path)
    script = table.pop("script", None)
    if script is not None and not isinstance(script, str):
        raise _wrong_type(path, "script", "a string", script)
    args = table.pop("args", [])
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise _wrong_type(path, "args", "a list of strings", args)
    env = _env(path, table.pop("env", {}))
    values: dict[str, str | bool] = {}
    for key, value in table.items():
        option = BY_KEY.get(key)
        if option is None:
            names = ["script", "args", "env", *(name for each in OPTIONS for name in (*each.also, each.name))]
            raise UsageError(f"{path}: unknown key {key!r}{did_you_mean(key.replace('_', '-'), names)}")
        if option.dest == "config":
            raise UsageError(f"{path}: a job file cannot include another one (key {key!r})")
        if option.dest in values:
            raise UsageError(f"{path}: key {key!r} sets --{option.name} a second time under another name")
        values[option.dest] = _as_text(path, key, option, value)
    return JobFile(path=path, script=script, args=tuple(args), values=values, env=env)


def _toml(path: str) -> dict[str, object]:
    import tomllib  # only with --config

    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as err:
        raise UsageError(f"cannot read the job file {path}: {err.strerror}") from err
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as err:
        line = content.count(b"\n", 0, err.start) + 1
        raise UsageError(f"{path}: not valid TOML: not UTF-8 (at line {line})") from err
    except tomllib.TOMLDecodeError as err:
        where = f"at line {content.count(10) + 1}, the end of the file"
        raise UsageError(f"{path}: not valid TOML: {str(err).replace('at end of document', where)}") from err


def _env(path: str, env: object) -> dict[str, str]:
    if not isinstance(env, dict):
        raise _wrong_type(path, "env", "a table of strings", env)
    for name, value in env.items():
        if not isinstance(value, str):
            raise _wrong_type(path, f"env.{name}", "a string", value)
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"{path}: {name!r} cannot be an environment variable")
        if name in _LAUNCHERS_OWN or name.startswith("TORCHELASTIC_"):
            raise UsageError(f"{path}: [env] cannot set {name}: the launcher sets it for each rank")
    return env


def _as_text(path: str, key: str, option: Option, value: object) -> str | bool:
    """The value as the command line would have it, if its type is one that the option accepts."""
    if isinstance(value, bool):
        if "boolean" in option.toml:
            return value
    elif isinstance(value, str):
        if "string" in option.toml:
            return value
    elif isinstance(value, int):
        if "integer" in option.toml:
            return str(value)
    elif isinstance(value, float):
        if "number" in option.toml:
            return repr(value)
    elif isinstance(value, list) and "list" in option.toml:
        items: list[object] = value
        if all(isinstance(item, str) or (isinstance(item, int) and not isinstance(item, bool)) for item in items):
            # Items may contain commas only if the command line can express them (`,,`).
            doubled = option.dest.startswith("duplicate_")
            return ",".join(str(item).replace(",", ",,") if doubled else str(item) for item in items)
        raise _wrong_type(path, key, "a list of strings or integers", value)
    # An integer is a number too: one of the two names is enough.
    kinds = [kind for kind in option.toml if kind != "integer" or "number" not in option.toml]
    raise _wrong_type(path, key, " or ".join(_KINDS[kind] for kind in kinds), value)


def _wrong_type(path: str, key: str, expected: str, value: object) -> UsageError:
    got = {"str": "the string", "bool": "the boolean", "int": "the integer", "float": "the number", "list": "the list"}
    kind = "a table" if isinstance(value, dict) else f"{got.get(type(value).__name__, 'a date or time:')} {value!r}"
    return UsageError(f"{path}: key {key!r} must be {expected}, got {kind}")
