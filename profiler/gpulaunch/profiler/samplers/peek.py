"""Reads the stack of a rank's main thread directly from its memory: the same permissions as py-spy, much less overhead.

py-spy resolves the interpreter's symbols again for each sample, which is nearly all of a sample's CPU time. Here the
offsets are known (`pylayout`), for ranks that run the same interpreter as the sidecar; for any other process, and if
anything is unexpected, py-spy is used.

The process runs on while it is read. Frames are contiguous and are read in one piece, and the code pointer of a frame
must point to a code object; otherwise the sample is torn, and is retried. So is one that ends with a frame which had a
caller before: the frame of a generator is elsewhere in memory, and has no caller once the generator has yielded.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
import types
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

from gpulaunch.profiler.samplers.gil import is_of_thread, waits_for_gil
from gpulaunch.profiler.samplers.pylayout import Layout, LayoutError, base_of, find_layout, lines_of, read_memory
from gpulaunch.profiler.samplers.pyspy import Look, PySpy
from gpulaunch.profiler.stack import Frame

_PAUSE_S: Final = 0.002
_PAUSES_S: Final = (*(0.0,) * 8, _PAUSE_S, _PAUSE_S)
"""After each try. At once, the process is still in the same call, so that no kind of code is under-represented: half of
the first tries within a log message are torn, and of those within `torch.mm` one in a hundred. But one that waits for a
core stays where it is."""
_TORN: Final = "own reader: its stack changed each time that it was read"
_TORN_LOOKS: Final = 3
"""In a row, of a process, before py-spy is tried: it takes a hundred times as long, and the next look may succeed."""
CHECKS: Final = 50
"""How often the own stack is read before its layout is not believed: a stack may be torn."""
_HOLDER_TRIES: Final = 3
"""To read the stack of the thread that holds the GIL: it runs meanwhile."""
_MOST_THREADS: Final = 4096
_MOST_FRAMES: Final = 2000
"""More than Python's default recursion limit; deeper stacks are cut there."""
_PIECE_BYTES: Final = 8192
_LONGEST_TEXT: Final = 4096
_LONGEST_TABLE: Final = 1 << 18
_MOST_KNOWN: Final = 4096
_MOST_PROCESSES: Final = 256
"""Whose functions are remembered, about 20 kB each: workers may be started anew every epoch."""
_TAG: Final = 7
_SHIM: Final = "<shim>"  # in 3.12, the file of a frame with which C calls Python


class StackSampler(Protocol):
    """A source of stack samples: this module, py-spy, and later Python's own sampler (3.15)."""

    @property
    def name(self) -> str:
        """Its name, for people."""
        ...

    def absent(self) -> str:
        """Return why it cannot sample on this node, or ""."""
        ...

    def look(self, pid: int) -> Look:
        """Sample one process, without stopping it. May block for a few seconds at most; never raises."""
        ...


class _TornError(Exception):
    """The stack changed while it was read, or the process is not a Python of this build."""


class _Function(NamedTuple):
    """A code object: its name, its file, and its table of lines."""

    name: str
    file: str
    ends: array[int]
    """Of the ranges of instructions, in bytes."""
    lines: array[int]
    """Of each range; 0: none."""


class Peek:
    """Reads stacks directly where possible, and uses another sampler otherwise."""

    def __init__(self, otherwise: StackSampler | None = None) -> None:
        self._otherwise: StackSampler = otherwise or PySpy()
        self._layout: Layout | None = None
        self._refused = ""
        """Why direct reading is not possible."""
        self._bases: dict[int, int] = {}  # pid -> address of its mapping of the interpreter's file
        self._known: dict[tuple[int, ...], Frame | None] = {}
        self._functions: dict[tuple[int, ...], _Function] = {}
        self._called: dict[int, set[tuple[str, str]]] = {}  # pid -> file and name of frames that had a caller
        self._longest: dict[int, tuple[int, tuple[str, str]]] = {}  # pid -> frames and end of its longest stack so far
        self._torn: dict[int, int] = {}  # pid -> looks in a row that were torn

    @property
    def name(self) -> str:
        """The sampler in use."""
        return "own reader" if self._layout is not None else self._otherwise.name

    def absent(self) -> str:
        """Return why this cannot sample on this node, or ""."""
        if self._layout is None and not self._refused:
            try:
                layout = find_layout()
                self._check(layout)
                self._layout = layout
            except (LayoutError, RuntimeError) as error:  # RuntimeError: no thread can be started
                self._refused = str(error)
        return "" if self._layout is not None else self._otherwise.absent()

    def look(self, pid: int) -> Look:
        """Sample one process; never raises."""
        failed = self.absent()
        if self._layout is not None:
            for pause_s in _PAUSES_S:
                failed = "own reader: it does not run the same Python"
                try:
                    if not (base := self._base_of(pid, self._layout)):
                        break
                    thread = _main_thread(pid, base, self._layout)
                    holder = _gil_holder(pid, base, self._layout)
                    frames = tuple(self._frames(pid, thread, base, self._layout))
                    if frames and self._is_whole(pid, frames):
                        self._torn.pop(pid, None)
                        is_other = bool(holder) and holder != thread
                        return Look(
                            frames=frames,
                            holds_gil=None if holder is None else holder == thread,
                            gil_holder=self._frames_of_holder(pid, holder or 0, base, self._layout) if is_other else (),
                        )
                    failed = _TORN if frames else ""  # as C returns to Python, it points to no frame for a moment
                except OSError as error:
                    failed = f"own reader: {error.strerror}"
                except (_TornError, ValueError, struct.error):
                    failed = "own reader: its stack could not be read in one piece"
                if pause_s:
                    self._bases.pop(pid, None)  # it may be another program by now
                    time.sleep(pause_s)
            if not failed:
                return Look()
            torn_looks = self._count_torn(pid) if failed == _TORN else _TORN_LOOKS
            if torn_looks == 1:
                return Look()
            self._called.pop(pid, None)  # it may run another program by now
            self._longest.pop(pid, None)
            if torn_looks < _TORN_LOOKS:
                return Look()
            if self._otherwise.absent():
                return Look(failed=failed if os.path.exists(f"/proc/{pid}") else "")
        return self._otherwise.look(pid)

    def _count_torn(self, pid: int) -> int:
        """Count a look that was torn; return how many were in a row."""
        if len(self._torn) >= _MOST_PROCESSES:
            self._torn.clear()
        self._torn[pid] = self._torn.get(pid, 0) + 1
        return self._torn[pid]

    def _is_whole(self, pid: int, frames: tuple[Frame, ...]) -> bool:
        """Whether a stack ends with a frame that never had a caller: of a program that writes JSON, half do not."""
        if pid not in self._called and len(self._called) >= _MOST_PROCESSES:
            self._called.clear()
            self._longest.clear()
        called = self._called.setdefault(pid, set())
        if len(called) >= _MOST_KNOWN:
            called.clear()
        *inner, end = ((frame.file, frame.name) for frame in frames)
        called.update(each for each in inner if each != end)  # `<module>` of a string may run another such string
        # Until the caller of each generator has been seen, the longest stack still ends where all do.
        if len(frames) > self._longest.get(pid, (0, end))[0]:
            self._longest[pid] = len(frames), end
        return end not in called and end == self._longest[pid][1]

    def _check(self, layout: Layout) -> None:
        """Read our own main thread and compare it with Python's view. Raises LayoutError if they differ.

        Runs in a new thread, so that the main thread does not move meanwhile if it is the caller.
        """
        told: list[bool] = []
        checking = threading.Thread(target=lambda: told.append(self._reads_what_python_says(layout)), daemon=True)
        checking.start()
        checking.join()
        if told != [True]:
            raise LayoutError("its stack reads differently")

    def _reads_what_python_says(self, layout: Layout) -> bool:
        for _ in range(CHECKS):
            before = _as_python_says()
            try:
                base = self._base_of(os.getpid(), layout)
                thread = _main_thread(os.getpid(), base, layout)
                if before == tuple(self._frames(os.getpid(), thread, base, layout)):
                    return True
            except (OSError, ValueError, struct.error, _TornError):
                pass  # it may have been torn
            time.sleep(_PAUSE_S)
        return False

    def _base_of(self, pid: int, layout: Layout) -> int:
        """Address at which a process has our interpreter mapped; 0: nowhere."""
        if len(self._bases) >= _MOST_KNOWN:
            self._bases.clear()
        if pid not in self._bases and (base := base_of(pid, layout.mapped)):
            self._bases[pid] = base
        return self._bases.get(pid, 0)

    def _frames(self, pid: int, thread: int, base: int, layout: Layout) -> Iterator[Frame]:
        """The frames of a thread, the innermost first."""
        pointer = thread
        for offset in layout.current:
            pointer = _word(pid, pointer + offset)
        need = 8 + max(layout.frame_code, layout.frame_previous, layout.frame_instruction)
        piece, begin = b"", 0
        for _ in range(_MOST_FRAMES):
            if not pointer:
                return
            if not begin <= pointer <= begin + len(piece) - need:
                begin, piece = _piece(pid, pointer, need)
            at = pointer - begin
            code = _at(piece, at + layout.frame_code) & ~_TAG
            if code != base + layout.none:
                frame = self._frame(pid, code, _at(piece, at + layout.frame_instruction), base, layout)
                if frame is not None:
                    yield frame
            pointer = _at(piece, at + layout.frame_previous)

    def _frames_of_holder(self, pid: int, holder: int, base: int, layout: Layout) -> tuple[Frame, ...]:
        """The frames of another thread that holds the GIL, if the main thread waits for that; empty otherwise."""
        for _ in range(_HOLDER_TRIES):
            try:
                if not waits_for_gil(pid, base + layout.runtime + (layout.gil or 0)):
                    return ()
                frames = tuple(self._frames(pid, holder, base, layout))
                if _gil_holder(pid, base, layout) != holder:
                    return ()
            except (OSError, _TornError, ValueError, struct.error):
                continue
            if is_of_thread(frames):
                return frames
        return ()

    def _frame(self, pid: int, code: int, instruction: int, base: int, layout: Layout) -> Frame | None:
        """One frame; None for frames of C code only."""
        head = read_memory(pid, code, layout.code_start)
        if _at(head, layout.code_is) != base + layout.code_type:
            raise _TornError
        name, file, table = (_at(head, at) for at in (layout.code_name, layout.code_file, layout.code_lines))
        # Memory is used again, but not for other code with the same name, file and table of lines at the same places.
        key = pid, code, instruction, name, file, table
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
                self._functions.clear()
            function = self._functions.get((pid, code, name, file, table))
            if function is None:
                (first,) = struct.unpack_from("@i", head, layout.code_first_line)
                lines = [(end, line or 0) for end, line in lines_of(_content(pid, table, layout), first)]
                try:
                    ends, numbers = array("I", (end for end, _ in lines)), array("I", (line for _, line in lines))
                except OverflowError:  # no numbers of lines
                    raise _TornError from None
                function = _Function(_text(pid, name, layout), _text(pid, file, layout), ends, numbers)
                self._functions[pid, code, name, file, table] = function
            at = bisect_right(function.ends, instruction - code - layout.code_start)
            line = function.lines[at] if at < len(function.lines) else 0
            frame = Frame(name=function.name, file=function.file, line=line)
            self._known[key] = None if frame.file == _SHIM else frame
        return self._known[key]


def _gil_holder(pid: int, base: int, layout: Layout) -> int | None:
    """The address of the state of the thread that holds the GIL; 0: no thread does; None: not known."""
    if layout.gil is None:
        return None
    holder, is_held = struct.unpack("@Qi", read_memory(pid, base + layout.runtime + layout.gil, 12))
    return int(holder) if is_held == 1 else 0


def _main_thread(pid: int, base: int, layout: Layout) -> int:
    """The address of the oldest thread's state: new ones are put before the others."""
    thread = _word(pid, _word(pid, base + layout.runtime + layout.interpreter) + layout.threads)
    for _ in range(_MOST_THREADS):
        older = _word(pid, thread + layout.older)
        if not older:
            return thread
        thread = older
    raise _TornError


def _piece(pid: int, pointer: int, need: int) -> tuple[int, bytes]:
    """The start address and the content of the memory with a frame and, below it, its callers."""
    begin = max(pointer - _PIECE_BYTES, 0)
    size = pointer - begin + need
    try:
        piece = read_memory(pid, begin, size)
        if len(piece) == size:
            return begin, piece
    except OSError:
        pass  # the memory below is not mapped
    return pointer, read_memory(pid, pointer, need)


def _content(pid: int, address: int, layout: Layout) -> bytes:
    """A bytes object."""
    length = _word(pid, address + layout.bytes_length)
    if length > _LONGEST_TABLE:
        raise _TornError
    return read_memory(pid, address + layout.bytes_data, length) if length else b""


def _text(pid: int, address: int, layout: Layout) -> str:
    """An ASCII string; others have another layout, and are left to py-spy."""
    length = _word(pid, address + layout.str_length)
    if not 0 < length <= _LONGEST_TEXT:
        raise _TornError
    text = read_memory(pid, address + layout.str_data, length).decode("ascii")
    if not text.isprintable():
        raise _TornError
    return sys.intern(text)


def _word(pid: int, address: int) -> int:
    return _at(read_memory(pid, address, 8), 0)


def _at(memory: bytes, offset: int) -> int:
    word: int = struct.unpack_from("@Q", memory, offset)[0]
    return word


def _as_python_says() -> tuple[Frame, ...]:
    """The stack of our own main thread."""
    # Documented as "should be used for internal and specialized purposes only"; this is one.
    frame: types.FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
    frames: list[Frame] = []
    while frame is not None:
        frames.append(Frame(name=frame.f_code.co_qualname, file=frame.f_code.co_filename, line=frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(frames)
