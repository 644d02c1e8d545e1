"""Finds per-process state that an import created: generators, uuids, locks, its pid, the time.

The fork server checks for it after each import of a package; a forked rank reseeds the generators that were seeded
from the system. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import logging
import os
import random
import re
import signal
import stat
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Generator, Iterator, Mapping
from types import ModuleType
from typing import Any

_by_system: dict[int, tuple[weakref.ref[random.Random], Any]] = {}  # id -> generator, its state when it was seeded
_by_process: dict[int, weakref.ref[random.Random]] = {}  # seeded with the pid, or the time
_uuids: list[tuple[dict[str, Any], str]] = []  # globals of modules, and the name of one that is a uuid
# If one of these exists, it counts as drawn during the module's import if the module's source says so.
_NAME = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
_DRAWS = (b"uuid1(", b"uuid4(")
_PART_OF_NAME = re.compile(r"(?=.*[0-9])[0-9a-f]{6,31}")
_DATES = ("%Y%m%d", "%Y-%m-%d", "%Y_%m_%d", "%b%d_%H")
_LONGEST_NAME = 200
# It writes its import time into C sources that it generates, and nowhere else; scipy and scikit-learn import it.
_TIME_OF_NO_MATTER = frozenset({"numpy.f2py.rules"})
_OF_NUMPY = ("Generator", "RandomState", "BitGenerator")


@contextlib.contextmanager
def watching() -> Generator[None]:
    """Record what every `random.Random` is seeded with."""
    plain = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        plain(self, a, version)
        _by_system.pop(id(self), None)
        maker = sys._getframe(2).f_globals.get("__name__")  # pyright: ignore[reportPrivateUsage]
        if isinstance(self, random.SystemRandom) or maker == "tempfile":  # detects the fork by itself
            return
        if a is None:
            _by_system[id(self)] = weakref.ref(self), self.getstate()
        elif isinstance(a, (int, float)) and (a == os.getpid() or abs(a - time.time()) < 3600):
            _by_process[id(self)] = weakref.ref(self)

    random.Random.seed = seed  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed = plain  # type: ignore[method-assign]


def _alive(held: Mapping[int, tuple[weakref.ref[random.Random], Any]]) -> Iterator[tuple[random.Random | None, Any]]:
    return ((reference(), state) for reference, state in held.values())


def renew() -> None:
    """In a rank: reseed generators that were seeded from the system, and redraw the uuids of modules."""
    for generator, _ in _alive(_by_system):
        if generator is not None:
            generator.seed()
    drawn: dict[Any, uuid.UUID] = {}
    for names, name in _uuids:
        old = names[name]
        new = drawn.setdefault(str(old), uuid.uuid4())
        names[name] = new if isinstance(old, uuid.UUID) else new.hex if "-" not in old else str(new)


class Before:
    """The state of the process-wide generators, and the time, before an import."""

    def __init__(self) -> None:
        self.states = generator_states()
        self.settings = _settings()
        self.generators = {*_by_system, *_by_process}
        self.names = _temporary_names()
        self.time_s, self.clock_s = time.time(), time.monotonic()


def _temporary_names() -> Any:
    """tempfile's position in its sequence of names, which begins with the first file or directory."""
    names = vars(tempfile)["_name_sequence"]
    return None if names is None else names.rng.getstate()


def generator_states() -> dict[str, Any]:
    """The states of the random generators that all modules share, by package."""
    found: dict[str, Any] = {"random": random.getstate()}
    with contextlib.suppress(Exception):
        found["numpy"] = [str(part) for part in sys.modules["numpy.random"].get_state()[2:3]]
    with contextlib.suppress(Exception):
        found["torch"] = bytes(sys.modules["torch"].get_rng_state().numpy().tobytes())
    return found


def _settings() -> dict[str, Any]:
    """Settings of the process, not of a module: a rank that never imports the package would get them too."""
    root = logging.getLogger()
    found: dict[str, Any] = {
        "the root logger": (root.level, [*map(id, root.handlers)]),
        "signal handlers": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "the working directory": os.getcwd(),
        "the recursion limit": sys.getrecursionlimit(),
        "sys.excepthook": sys.excepthook,
        "the files open for writing": _open_for_writing(),
    }
    with contextlib.suppress(Exception):
        found["the start method of multiprocessing"] = sys.modules["multiprocessing"].get_start_method(allow_none=True)
    with contextlib.suppress(Exception):
        torch = sys.modules["torch"]
        backends = torch.backends
        found["torch defaults"] = (
            *(torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()),
            *(torch.are_deterministic_algorithms_enabled(), backends.cudnn.deterministic, backends.cudnn.benchmark),
        )
    return found


def _open_for_writing() -> set[str]:
    """Files and pipes: data buffered for them would be written never, or by each rank."""
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            mode = os.fstat(int(name)).st_mode
            writable = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            if writable and (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def for_one_process(before: Before) -> str:
    """Why the import since `before` created per-process state, or "". Needs `gc.freeze()` before the import."""
    settings = _settings()
    for what, value in before.settings.items():
        if settings.get(what) != value:
            return f"it changes {what} while it is imported, for all ranks"
    if _temporary_names() != before.names:
        return "it creates a temporary file or directory while it is imported, which all ranks would share"
    states = generator_states()
    if any(states.get(name) != state for name, state in before.states.items()):
        return "it seeds, or draws from, a global random generator while it is imported"
    new = {key: held for key, held in _by_system.items() if key not in before.generators}
    # One that has not been drawn from is reseeded in each rank, which makes it as good as new.
    if any(generator is not None and generator.getstate() != state for generator, state in _alive(new)):
        return "it draws random numbers while it is imported"
    if any(key not in before.generators and reference() is not None for key, reference in _by_process.items()):
        return "it seeds a random generator with its pid or the time while it is imported"
    return _among(gc.get_objects(), before.time_s, before.clock_s)


def _among(objects: list[Any], since_s: float, clock_s: float) -> str:
    kinds: dict[type, str] = {}
    clocks = ((since_s, time.time()), (clock_s, time.monotonic()))
    for thing in objects:
        kind = type(thing)
        what = kinds.get(kind)
        if what is None:
            what = kinds[kind] = _named(kind)
        if what and not _has_a_fixed_seed(thing):
            return f"it creates {what} while it is imported, which all ranks would share"
        if kind is dict and isinstance(owner := thing.get("__module__", thing.get("__name__")), str):
            found = find_in_namespace(thing, sys.modules.get(owner), *clocks)
            if found:
                return f"it keeps {found} from its import, which all ranks would share"
    return ""


def _named(kind: type) -> str:
    """The name of an object type, for the kinds that are recreated for each process."""
    for base in kind.__mro__:
        where, name = str(base.__module__), str(base.__qualname__)
        if where.startswith("numpy.random") and name in _OF_NUMPY:
            return "a random generator"
        if where in ("torch._C", "torch") and name == "Generator":
            return "a random generator"
        if where == "multiprocessing.synchronize" and name == "SemLock":
            return "a multiprocessing lock"
    return ""


def _has_a_fixed_seed(thing: Any) -> bool:
    """numpy's SeedSequence draws 128 bits by default; a seed written in source code is shorter."""
    try:
        entropy = getattr(thing, "bit_generator", thing).seed_seq.entropy
        return isinstance(entropy, int) and entropy < 1 << 64 and type(thing).__name__ != "RandomState"
    except Exception:
        return False


def find_in_namespace(
    names: dict[str, Any], module: ModuleType | None, times_s: tuple[float, float], clocks_s: tuple[float, float]
) -> str:
    """Find a pid, a time or a random name among the globals of a module or the attributes of a class.

    `times_s`, `clocks_s`: start and end of the import, by time.time() and by time.monotonic().
    """
    if module is not None and module.__name__ in _TIME_OF_NO_MATTER:
        return ""
    text: bytes | None = None
    (since_s, now_s), pid = times_s, os.getpid()
    dates = _dates(int(now_s))
    for name, value in list(names.items()):
        kind = type(value)
        what = ""
        words: tuple[bytes, ...] = ()
        if kind is int and value == pid:
            what, words = "a pid", (b"getpid",)
        elif kind in (int, float) and int(since_s) <= value <= now_s:  # int(time.time()) is up to a second ago
            what, words = "a time", (b"time",)
        elif kind is float and clocks_s[0] <= value <= clocks_s[1]:
            what, words = "a time", (b"monotonic(", b"perf_counter(")
        elif kind.__module__ == "datetime" and kind.__name__ == "datetime":
            with contextlib.suppress(Exception):
                if since_s <= value.timestamp() <= now_s:
                    what, words = "a time", (b"now", b"today")
        elif (kind.__module__ == "uuid" and kind.__name__ == "UUID") or (kind is str and _NAME.fullmatch(value)):
            what, words = "a uuid", _DRAWS
        elif kind is str and len(value) <= _LONGEST_NAME and any(date in value for date in dates):
            what, words = "a time", (b"strftime", b"now(", b"today(", b"ctime(")
        elif kind is str and _PART_OF_NAME.fullmatch(value):
            what, words = "a random name", (*_DRAWS, b"token_hex(")
        if what:
            if text is None:
                text = _source(module)
            if not any(word in text for word in words):
                continue
            if what != "a uuid" or module is None or names is not vars(module):
                return what
            _uuids.append((names, name))
    return ""


@functools.lru_cache(1)
def _dates(at_s: int) -> list[str]:
    """A date as names spell it, local and UTC; the new date if the import ran over midnight."""
    return [time.strftime(date, to(at_s)) for date in _DATES for to in (time.localtime, time.gmtime)]


def _source(module: ModuleType | None) -> bytes:
    path = str(getattr(module, "__file__", "") or "")
    if path.endswith(".py") and module is not None and module.__name__ != "uuid":  # uuid's own are constants
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return file.read()
    return b""
