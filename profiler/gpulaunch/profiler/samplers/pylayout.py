"""Finds the memory layout of this Python's thread frames by inspecting its own process; checked before use.

CPython's structures change with every version and no header documents how to read them from outside. But a blocked
thread can be inspected from both sides: `sys._current_frames` returns its frames, and searching the memory of the
process for their addresses gives the offset of each field that a reader needs. This needs no table of versions. The
result holds for every process that runs the same interpreter file.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

_INTERPRETER_BYTES: Final = 1 << 18
_RUNTIME_BYTES: Final = 1 << 14
_THREAD_BYTES: Final = 512
_FRAME_BYTES: Final = 96
_CODE_START_BYTES: Final = 512
TRIES: Final = 100
"""How often the layout is looked for: the thread that is looked at may not be blocked yet."""
_PAUSE_S: Final = 0.005
_TAG: Final = 7  # since 3.14 the low bits of a reference in a frame encode its ownership; objects are aligned to 16


class LayoutError(Exception):
    """This Python cannot be inspected this way; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Offsets in bytes."""

    mapped: str
    """Device and inode of the file that the interpreter's state is mapped from, as in /proc/PID/maps."""
    runtime: int
    """Of `_PyRuntime`, from the start of that mapping."""
    code_type: int
    """Of the type of code objects, from there: an object that points to it is a code object."""
    none: int
    """Of None, from there: since 3.13, the code of a frame with which C calls Python."""
    interpreter: int
    """In the runtime, of the pointer to the main interpreter."""
    threads: int
    """In an interpreter, of the pointer to its newest thread."""
    older: int
    """In a thread, of the pointer to the next older one."""
    current: tuple[int, ...]
    """From a thread to its innermost frame: one pointer, or (until 3.12) two."""
    frame_code: int
    frame_previous: int
    frame_instruction: int
    code_is: int
    """In a code object, of the pointer to its type."""
    code_file: int
    code_name: int
    code_lines: int
    code_first_line: int
    code_start: int
    str_length: int
    str_data: int
    """Of the characters of an ASCII string."""
    bytes_length: int
    bytes_data: int
    gil: int | None
    """From `_PyRuntime`, of the pointer to the last thread that held the GIL; whether it is held follows. None: it was
    not found."""


# -- memory


class _Extent(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _process_vm_readv() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    extents = ctypes.POINTER(_Extent)
    function.argtypes = (ctypes.c_int, extents, ctypes.c_ulong, extents, ctypes.c_ulong, ctypes.c_ulong)
    function.restype = ctypes.c_ssize_t
    return function


def read_memory(pid: int, address: int, size: int) -> bytes:
    """Read memory of a process; less than `size` bytes if the rest is not mapped.

    Raises:
        OSError: nothing could be read: no such process, no permission, no such address.
    """
    buffer = ctypes.create_string_buffer(size)
    here, there = _Extent(ctypes.addressof(buffer), size), _Extent(address, size)
    got = _process_vm_readv()(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if got < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return buffer.raw[:got]


def base_of(pid: int, mapped: str) -> int:
    """Address at which a process has a file mapped, by its device and inode; 0 if it has not. Raises OSError."""
    return min((start for start, _, file in _mappings(pid) if file == mapped), default=0)


def _mappings(pid: int) -> Iterator[tuple[int, int, str]]:
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            extent, _, _, device, inode, *_ = line.split(None, 5)
            start, _, end = extent.partition("-")
            yield int(start, 16), int(end, 16), f"{device} {inode}"


# -- the table of lines


def lines_of(table: bytes, first: int) -> Iterator[tuple[int, int | None]]:
    """Decode a code object's line table: (end of a range of instructions in bytes, its line).

    The format is in CPython's Objects/locations.md (InternalDocs/code_objects.md from 3.14 on), the same since 3.11.
    """
    at = end = 0
    line = first
    while at < len(table):
        kind, length = table[at] >> 3 & 15, (table[at] & 7) + 1
        at += 1
        delta = kind - 10 if 10 <= kind <= 12 else 0
        if kind in (13, 14):
            number, shift = 0, 0
            for byte in table[at : at + 6]:
                number |= (byte & 63) << shift
                shift += 6
                if not byte & 64:
                    break
            delta = -(number >> 1) if number & 1 else number >> 1
        while at < len(table) and not table[at] & 128:  # the first byte of an entry, and no other, has this bit
            at += 1
        line += delta
        end += 2 * length
        yield end, None if kind == 15 else line


# -- inspecting ourselves


def find_layout() -> Layout:
    """Find the layout of this Python; starts a thread for a moment.

    Raises:
        LayoutError: this Python, or this system, has another structure.
    """
    if sys.implementation.name != "cpython" or struct.calcsize("P") != 8:
        raise LayoutError("not CPython on a machine of 64 bits")
    release = threading.Lock()
    release.acquire()
    parked = threading.Thread(target=_park, args=(release,), daemon=True)
    parked.start()
    try:
        for left in reversed(range(TRIES)):  # until the thread is blocked
            try:
                return _look(sys._current_frames()[parked.ident or 0])  # pyright: ignore[reportPrivateUsage] (ours)
            except (LayoutError, OSError, AttributeError, ValueError, LookupError) as error:
                if not left:
                    raise LayoutError(str(error)) from error
                time.sleep(_PAUSE_S)
        raise AssertionError("the last try either returns or raises")
    finally:
        release.release()
        parked.join()


def _park(release: threading.Lock) -> None:
    _wait(release)


def _wait(release: threading.Lock) -> None:
    release.acquire()  # a frame that waits in a C function does not change


def _look(inner: types.FrameType) -> Layout:
    outer = inner.f_back
    if inner.f_code is not _wait.__code__ or outer is None:
        raise LayoutError("its threads do not start")
    mapped, base, end = _mapped_runtime()
    runtime, code_type, none = _address("_PyRuntime"), id(types.CodeType), id(None)
    if not base <= min(code_type, none) <= max(code_type, none) < end:
        raise LayoutError("its types are not where its state is")
    interpreter = _call("PyInterpreterState_Main")
    thread = _call("PyInterpreterState_ThreadHead", interpreter)
    older = _call("PyThreadState_Next", thread)
    inner_frame, frame_code = _frame_of(inner)
    outer_frame, again = _frame_of(outer)
    if again != frame_code:
        raise LayoutError("its frames differ")
    frame_instruction, code_start = _instruction(outer, outer_frame)
    if (frame_instruction, code_start) != _instruction(inner, inner_frame):
        raise LayoutError("its frames have no place in their code")
    code, first_line = _sample_code()
    text, data = "of a length that is no other word of it", b"the same, of a length that is not its either"
    text_memory, data_memory = _own(id(text), sys.getsizeof(text)), _own(id(data), sys.getsizeof(data))
    return Layout(
        mapped=mapped,
        runtime=runtime - base,
        code_type=code_type - base,
        none=none - base,
        interpreter=_find(runtime, _RUNTIME_BYTES, interpreter),
        threads=_find(interpreter, _INTERPRETER_BYTES, thread),
        older=_find(thread, _THREAD_BYTES, older),
        current=_way(thread, inner_frame),
        frame_code=frame_code,
        frame_previous=_find(inner_frame, _FRAME_BYTES, outer_frame),
        frame_instruction=frame_instruction,
        code_is=_find(id(code), _CODE_START_BYTES, code_type),
        code_file=_find(id(code), _CODE_START_BYTES, id(code.co_filename)),
        code_name=_find(id(code), _CODE_START_BYTES, id(code.co_qualname)),
        code_lines=_find(id(code), _CODE_START_BYTES, id(code.co_linetable)),
        code_first_line=_own(id(code), code.__sizeof__()).index(struct.pack("@i", first_line)),
        code_start=code_start,
        str_length=_find(id(text) + 16, 32, len(text)) + 16,
        str_data=text_memory.index(text.encode()),
        bytes_length=_find(id(data) + 16, 32, len(data)) + 16,
        bytes_data=data_memory.index(data),
        gil=_gil(runtime, interpreter),
    )


def _gil(runtime: int, interpreter: int) -> int | None:
    """The GIL's state is in the runtime, since 3.12 in the interpreter: the interval after which it is asked for, then
    its last holder, then whether it is held. None: nothing looks like it, or several do."""
    interval_us, holder = round(1e6 * sys.getswitchinterval()), _call("PyThreadState_Get")
    found: set[int] = set()
    for address, size in ((runtime, _RUNTIME_BYTES), (interpreter, _INTERPRETER_BYTES)):
        # `_own` releases the GIL, and only tells how much of this is mapped; `string_at` holds it.
        memory = ctypes.string_at(address, len(_own(address, size)) // 8 * 8)
        for at in range(0, len(memory) - 16, 8):
            if struct.unpack_from("@QQi", memory, at) == (interval_us, holder, 1):
                found.add(address + at + 8 - runtime)
    return found.pop() if len(found) == 1 else None


def _mapped_runtime() -> tuple[str, int, int]:
    """The file that the interpreter's state is mapped from, where it begins, and where what belongs to it ends."""
    runtime = _address("_PyRuntime")
    extents = list(_mappings(os.getpid()))
    # Zero-initialised data is behind the last piece of the file, in anonymous memory.
    own = max((each for each in extents if each[0] <= runtime and each[2] != "00:00 0"), key=lambda each: each[0])
    base = base_of(os.getpid(), own[2])
    return own[2], base, max(end for start, end, _ in extents if start <= runtime < end)


def _frame_of(frame: types.FrameType) -> tuple[int, int]:
    """The address of the interpreter's own frame behind a frame object, and the offset of the code in it."""
    for pointer in _words(id(frame) + 16, type(frame).__basicsize__ - 16):
        try:
            return pointer, _find(pointer, _FRAME_BYTES, id(frame.f_code), mask=~_TAG)
        except (OSError, LayoutError):
            continue
    raise LayoutError("its frame objects lead nowhere")


def _instruction(frame: types.FrameType, address: int) -> tuple[int, int]:
    """The offset of the instruction pointer in a frame, and that of the first instruction in a code object."""
    for index, word in enumerate(_words(address, _FRAME_BYTES)):
        start = word - id(frame.f_code) - frame.f_lasti
        if 0 < start < frame.f_code.__sizeof__() and word != id(frame.f_code):
            return 8 * index, start
    raise LayoutError("its frames have no instruction")


def _way(thread: int, frame: int) -> tuple[int, ...]:
    """The chain of offsets from a thread to its innermost frame."""
    for index, word in enumerate(_words(thread, _THREAD_BYTES)):
        if word == frame:
            return (8 * index,)
        try:
            return 8 * index, _find(word, 24, frame)
        except (OSError, LayoutError):
            continue
    raise LayoutError("its threads have no frame")


def _sample_code() -> tuple[types.CodeType, int]:
    first_line = 0x1234_5678
    code = _wait.__code__.replace(co_firstlineno=first_line, co_filename="a file", co_qualname="a.name")
    return code, first_line


def _find(address: int, size: int, wanted: int, *, mask: int = -1) -> int:
    """The offset of the first word with this value in our own memory."""
    for index, word in enumerate(_words(address, size)):
        if word & mask == wanted:
            return 8 * index
    raise LayoutError("it has something elsewhere")


def _words(address: int, size: int) -> Sequence[int]:
    memory = _own(address, size)
    return struct.unpack_from(f"@{len(memory) // 8}Q", memory)


def _own(address: int, size: int) -> bytes:
    return read_memory(os.getpid(), address, size)


def _address(name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, name))


def _call(name: str, *pointers: int) -> int:
    function: Any = ctypes.pythonapi[name]  # not by attribute: that object is shared by the process
    function.restype = ctypes.c_void_p
    return int(function(*map(ctypes.c_void_p, pointers)) or 0)
