"""Reads a pickle as data: follows its opcodes with `pickletools`; nothing is imported, called or created.

The values become plain ones: numbers, texts, lists, tuples, and `PickledObject` for everything that would have been an
object. A pickle that would run code when loaded is, here, a `PickledObject` with a name.
"""

from __future__ import annotations

import gc
import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO

from gpulaunch.launcher.checkpoint.damaged import Damaged, OutOfTimeError

_MARK = object()

_FREE = 200_000
_BYTES_PER_TUPLE = 4
_BYTES_PER_MEMO = 4
_MOST_STACKED = 1 << 20
"""Limit of what may be built from a pickle, in proportion to the bytes read: this many for free, then one tuple per 4
bytes (another object counts as two) and one memo entry per 4. A `.metadata` of 100,000 shards (14 MB, torch 2.13) has
one per 5.9 bytes, and one memo entry per 8.9; without a cap, one byte is enough for an object. Picklers stack 1000
values before they store them."""


class PickledObject:
    """A would-be object: the name it was made by, its arguments, and what was put into it."""

    __slots__ = ("args", "flat", "items", "name", "state")

    def __init__(self, name: str, args: Any = ()) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: list[Any] | None = None  # most have none, and an empty list takes as much memory as all of this
        self.flat: list[Any] | None = None
        """Alternating keys and values."""

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """The items of a dict."""
        flat = self.flat or []
        return list(zip(flat[::2], flat[1::2], strict=True))

    def set_items(self, values: list[Any]) -> None:
        """Set keys and values of a dict."""
        if len(values) % 2:
            raise IndexError
        if self.flat is None:
            self.flat = values
        else:
            self.flat.extend(values)

    def get(self, key: str) -> Any:
        """Return the value of a key of a dict, or of an attribute of an object; None if missing."""
        flat = (self.state.flat if isinstance(self.state, PickledObject) and not self.flat else self.flat) or []
        names = range(len(flat) - 2, -1, -2)
        return next((flat[at + 1] for at in names if type(flat[at]) is str and flat[at] == key), None)


class Pickle:
    """The result of reading a pickle: its value, and the persistent ids in it, by which torch names storages."""

    def __init__(self) -> None:
        self.value: Any = None
        self.persistent: list[Any] = []


def read(data: bytes | BinaryIO) -> Pickle:
    """Read one pickle from its beginning to its STOP. Raises Damaged if it is not one."""
    machine = _Machine()
    collecting = gc.isenabled()
    gc.disable()  # it would scan the growing millions of values again and again, which took most of the time
    try:
        for opcode, argument, at in pickletools.genops(data):
            _STEPS.get(opcode.name, _Machine.push)(machine, argument)
            machine.built += _BUILT.get(opcode.name, 0)
            machine.check_size(at or 0)
    except (OSError, OutOfTimeError, Damaged):
        raise
    except Exception as err:  # invalid bytes make pickletools raise many kinds of exceptions
        raise Damaged(f"not a whole pickle ({type(err).__name__})") from None
    finally:
        if collecting:
            gc.enable()
    return machine.result


class _Machine:
    """The stack machine of `pickle`, with objects replaced by their names: a method for each kind of opcode."""

    def __init__(self) -> None:
        self.result = Pickle()
        self._stack: list[Any] = []
        self.built = 0
        """What was built so far, counted in tuples."""
        self._memo: list[Any] = []
        self._far: dict[int, Any] = {}  # memo entries that are not numbered consecutively

    def check_size(self, read_bytes: int) -> None:
        """Raise Damaged if more was built than any pickle of that size needs."""
        memo = len(self._memo) + len(self._far)
        if (
            self.built > _FREE + read_bytes // _BYTES_PER_TUPLE
            or memo > _FREE + read_bytes // _BYTES_PER_MEMO
            or len(self._stack) > _MOST_STACKED
        ):
            raise Damaged(f"its pickle creates more objects than its size allows: at byte {read_bytes}")

    def push(self, value: Any) -> None:
        """Most opcodes push the literal that they carry."""
        self._stack.append(value)

    def nothing(self, _: Any) -> None:
        """Opcodes without an effect on values."""

    def stop(self, _: Any) -> None:
        self.result.value = self._stack.pop()

    def pop(self, _: Any) -> None:
        self._stack.pop()

    def pop_mark(self, _: Any) -> None:
        self._to_mark()

    def duplicate(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def memoize(self, _: Any) -> None:
        self.put(len(self._memo) + len(self._far))

    def put(self, at: Any) -> None:
        if int(at) == len(self._memo):
            self._memo.append(self._stack[-1])
        else:
            self._far[int(at)] = self._stack[-1]

    def get(self, at: Any) -> None:
        index = int(at)
        self._stack.append(self._far[index] if index in self._far or index < 0 else self._memo[index])

    def make_list(self, _: Any) -> None:
        self._stack.append(self._to_mark())

    def make_dict(self, _: Any) -> None:
        made = PickledObject("dict")
        made.set_items(self._to_mark())
        self._stack.append(made)

    def make_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._to_mark()))

    def make_frozenset(self, _: Any) -> None:
        self._stack.append(PickledObject("frozenset", tuple(self._to_mark())))

    def append(self, _: Any) -> None:
        self._extend([self._stack.pop()])

    def extend(self, _: Any) -> None:
        self._extend(self._to_mark())

    def set_item(self, _: Any) -> None:
        values = self.take(2)
        self._stack[-1].set_items(values)

    def set_items(self, _: Any) -> None:
        values = self._to_mark()
        self._stack[-1].set_items(values)

    def name(self, words: Any) -> None:
        self._stack.append(PickledObject(".".join(str(words).split(" ", 1))))

    def stack_name(self, _: Any) -> None:
        module, attribute = self.take(2)
        self._stack.append(PickledObject(f"{module}.{attribute}"))

    def extension(self, number: Any) -> None:
        self._stack.append(PickledObject(f"extension {number}"))

    def instance(self, words: Any) -> None:
        self._stack.append(PickledObject(".".join(str(words).split(" ", 1)), tuple(self._to_mark())))

    def object(self, _: Any) -> None:
        made, *args = self._to_mark()
        self._stack.append(PickledObject(made.name, tuple(args)))

    def call(self, _: Any) -> None:
        made, args = self.take(2)
        self._stack.append(PickledObject(made.name, args))

    def call_with_names(self, _: Any) -> None:
        made, args, _names = self.take(3)
        self._stack.append(PickledObject(made.name, args))

    def build(self, _: Any) -> None:
        state = self._stack.pop()
        self._stack[-1].state = state

    def persistent_text(self, identity: Any) -> None:
        self.result.persistent.append(identity)
        self._stack.append(PickledObject("persistent", identity))

    def persistent(self, _: Any) -> None:
        self.persistent_text(self._stack.pop())

    def buffer(self, _: Any) -> None:
        self._stack.append(PickledObject("buffer"))

    def take(self, count: int) -> list[Any]:
        """Pop the topmost values, in the order in which they were pushed."""
        values = self._stack[-count:]
        if len(values) != count:
            raise IndexError
        del self._stack[-count:]
        return values

    def _to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, PickledObject):
            target = target.items = target.items or []
        target.extend(values)


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "READONLY_BUFFER"), _Machine.nothing),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), _Machine.extend),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), _Machine.extension),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), _Machine.call),
    "MARK": lambda machine, _: machine.push(_MARK),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push(PickledObject("dict")),
    "EMPTY_SET": lambda machine, _: machine.push(PickledObject("set")),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.take(3))),
    "TUPLE": _Machine.make_tuple,
    "LIST": _Machine.make_list,
    "DICT": _Machine.make_dict,
    "FROZENSET": _Machine.make_frozenset,
    "APPEND": _Machine.append,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "STOP": _Machine.stop,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark,
    "DUP": _Machine.duplicate,
    "MEMOIZE": _Machine.memoize,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.stack_name,
    "INST": _Machine.instance,
    "OBJ": _Machine.object,
    "NEWOBJ_EX": _Machine.call_with_names,
    "BUILD": _Machine.build,
    "PERSID": _Machine.persistent_text,
    "BINPERSID": _Machine.persistent,
    "NEXT_BUFFER": _Machine.buffer,
}

_BUILT = {
    **dict.fromkeys(("TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"), 1),
    **dict.fromkeys(
        ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "LIST", "DICT", "FROZENSET", "GLOBAL", "STACK_GLOBAL"), 2
    ),
    **dict.fromkeys(("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "PERSID", "BINPERSID", "NEXT_BUFFER"), 2),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), 2),
}
"""What each opcode builds, counted in tuples."""
