"""What an option is: its spelling in each source, how its text becomes a value, and what it fills in.

A value has the same form in every source: the command line and the environment give text, the job file gives a typed
value that is first converted to that text; then one converter per option reads it. So no source can express something
another cannot. The options themselves are in `option_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar


class UsageError(Exception):
    """The user requested something impossible; `str()` is the line to print."""

    exit_code = 2


class TryLaterError(UsageError):
    """The job needs something that another process uses for now: the same command may succeed later."""

    exit_code = 69
    """EX_UNAVAILABLE of sysexits.h."""


N = TypeVar("N", int, float)
Converter = Callable[[str], object]

_TORCHS_LOGS_SPECS = "torch.distributed.elastic.multiprocessing:DefaultLogsSpecs"


def text(value: str) -> str:
    """The value unchanged."""
    return value


def integer(value: str) -> int:
    """A whole number, in any notation that Python's int() accepts, as in torchrun."""
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"expected a whole number, got {value!r}") from None


def number(value: str) -> float:
    """A finite number."""
    try:
        result = float(value)
    except ValueError:
        result = float("nan")
    if not -float("inf") < result < float("inf"):
        raise UsageError(f"expected a number, got {value!r}")
    return result


def words(value: str) -> list[str]:
    """Comma-separated items; `,,` is a comma inside an item, as in torchrun's --duplicate-stdout-filters."""
    return [word.replace("\0", ",") for word in value.replace(",,", "\0").split(",")]


def choice(*allowed: str) -> Converter:
    """A converter that accepts only one of these words."""

    def convert(value: str) -> str:
        if value not in allowed:
            raise UsageError(f"{value!r} is not one of {', '.join(allowed)}{did_you_mean(value, allowed)}")
        return value

    return convert


# -- converters that check a value once all sources are merged


def at_least(least: int) -> Callable[[N], N]:
    """A check for a lower bound."""

    def check(value: N) -> N:
        if value < least:
            raise UsageError(f"must be at least {least}, got {value}")
        return value

    return check


def if_given(check: Callable[[N], N]) -> Callable[[N | None], N | None]:
    """The same check for an option that has no default."""
    return lambda value: None if value is None else check(value)


def fraction(value: float | None) -> float | None:
    """Check: greater than 0 and at most 1."""
    if value is not None and not 0 < value <= 1:
        raise UsageError(f"must be greater than 0 and at most 1, got {value}")
    return value


def percent(value: float) -> float:
    """Check: from 0 to 100."""
    if not 0 <= value <= 100:
        raise UsageError(f"must be from 0 to 100, got {value:g}")
    return value


def rank_filter(text: str) -> frozenset[int] | None:
    """`0,2` -> those local ranks; empty: no filter."""
    if not text:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(is_number(part) for part in parts):
        raise UsageError(f"expected local ranks separated by commas, such as 0,2, got {text!r}")
    return frozenset(int(part) for part in parts)


def packages(text: str) -> tuple[str, ...] | None:
    """`auto` -> None, `none` -> (), else the names of the packages."""
    if text in ("auto", "none"):
        return None if text == "auto" else ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"expected auto, none, or package names separated by commas, got {text!r}")
    return names


def signal_names(text: str) -> tuple[str, ...]:
    """Names of signals that a process can catch."""
    import signal

    known = sorted(each.name for each in signal.Signals if each.name not in ("SIGKILL", "SIGSTOP"))
    names = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    for name in names:
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"{name} cannot be handled by any process; remove it")
        if name == "SIGCHLD":
            raise UsageError("SIGCHLD is used by the launcher to wait for its ranks; remove it")
        if name not in known:
            wanted = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
            raise UsageError(f"unknown signal {name!r}{did_you_mean(wanted, known)}")
    return names


_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_s(text: str) -> float:
    """`90`, `90s`, `10m`, `2h` or `1d` in seconds."""
    text = text.strip()
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS_S else (text, "s")
    try:
        seconds = float(number) * _UNITS_S[unit]
    except ValueError:
        seconds = float("nan")
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"expected a time such as 90, 30s, 10m or 2h, got {text!r}")
    return seconds


def rate(text: str | None) -> tuple[int, float] | None:
    """`5/10m`: five within ten minutes."""
    if text is None:
        return None
    count, slash, window = text.partition("/")
    if not slash or not is_number(count.strip()) or (window_s := duration_s(window)) <= 0:
        raise UsageError(f"expected a number within a time, such as 5/10m, got {text!r}")
    return int(count), window_s


def not_empty(text: str) -> str:
    """Check: not empty."""
    if not text.strip():
        raise UsageError("must not be empty")
    return text


def directories(text: str | None) -> tuple[str, ...]:
    """Paths or URLs separated by commas."""
    if text is None:
        return ()
    return tuple(not_empty(part).strip() for part in text.split(","))


def logs_specs(name: str | None) -> str | None:
    """--logs-specs names an entry point; torch registers its own as `default`, and no other can be honoured."""
    if name is None:
        return None
    from importlib import metadata

    found = {entry.value for entry in metadata.entry_points(group="torchrun.logs_specs", name=name)}
    if not found:
        raise UsageError(f"{name}: no installed package has an entry point torchrun.logs_specs[{name}]")
    if found != {_TORCHS_LOGS_SPECS}:
        raise UsageError(f"{name}: {found.pop()} is not supported: it decides itself where output goes")
    return name


def is_number(text: str) -> bool:
    """Whether this is written in the digits 0 to 9 only."""
    return text.isascii() and text.isdecimal()


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """`; did you mean X?` for the nearest known word, or nothing."""
    from difflib import get_close_matches  # only on the way to an error

    near = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


# -- options

STRING = ("string",)
INTEGER = ("integer",)
NUMBER = ("number", "integer")
BOOLEAN = ("boolean",)
STRING_OR_INTEGER = ("string", "integer")
STRINGS = ("string", "list")
NUMBERS = ("string", "integer", "list")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: its spelling in each source, its value, and its meaning."""

    name: str
    """Long name without the dashes, in dash spelling; also the job file's key."""
    also: tuple[str, ...] = ()
    """Other long names with the same meaning."""
    short: str = ""
    section: str
    help: str
    metavar: str = ""
    """Empty for a flag that takes no value."""
    convert: Converter = text
    default: object = None
    toml: tuple[str, ...] = STRING
    """The TOML types that a job file may give."""
    field: str = ""
    """The field of `JobSpec` that it fills in; "": `load` makes something of it that depends on the rest of the job."""
    check: Callable[[Any], object] = lambda value: value
    """Makes the field's value from the converted one, or raises UsageError."""
    ours: bool = False
    """Not one of torchrun's: its environment variable starts with GPULAUNCH_."""

    @property
    def dest(self) -> str:
        """Attribute of the parsed namespace."""
        return self.name.replace("-", "_")

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return not self.metavar

    @property
    def names(self) -> tuple[str, ...]:
        """Every long name, dash and underscore spelling, without the dashes."""
        return tuple(dict.fromkeys(s for n in (self.name, *self.also) for s in (n, n.replace("-", "_"))))

    @property
    def torchrun_strings(self) -> tuple[str, ...]:
        """The option strings that torchrun also has; its abbreviations must keep their meaning."""
        return () if self.ours else tuple(f"--{n}" for n in dict.fromkeys((self.name, self.dest)))

    @property
    def option_strings(self) -> tuple[str, ...]:
        """The accepted strings, preferred spelling first."""
        return (*((f"-{self.short}",) if self.short else ()), *(f"--{n}" for n in self.names))

    @property
    def environment(self) -> tuple[str, ...]:
        """Names of the environment variables that set it; a name that torchrun lacks gets our prefix."""
        first = f"{'GPULAUNCH' if self.ours else 'PET'}_{self.dest.upper()}"
        return (first, *(f"GPULAUNCH_{n.replace('-', '_').upper()}" for n in self.also))
