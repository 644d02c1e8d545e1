"""A pickle read as data: its opcodes are followed with `pickletools`, and nothing is imported, called or created.

What a pickle would have built becomes plain values: numbers, texts, lists, tuples, and `Thing` for everything that
would have been an object. A pickle that would run code when loaded is, here, a `Thing` with a name.
"""

from __future__ import annotations

import gc
import pickletools
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from gpulaunch.launcher.checkpoint.damaged import Damaged

_MARK = object()


class Thing:
    """What would have been an object: the name it was made by, what it was given, and what was put into it."""

    __slots__ = ("args", "items", "name", "pairs", "state")

    def __init__(self, name: str, args: Any = ()) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []

    def get(self, key: str) -> Any:
        """Give what a dict, or the attributes of an object, has under a key; None when it has nothing."""
        pairs = self.state.pairs if isinstance(self.state, Thing) and not self.pairs else self.pairs
        return next((value for name, value in reversed(pairs) if type(name) is str and name == key), None)


class Pickle:
    """One pickle that was read: its value, and the persistent ids it mentions, which is how torch names storages."""

    def __init__(self) -> None:
        self.value: Any = None
        self.persistent: list[Any] = []


def read(data: bytes | BinaryIO) -> Pickle:
    """Read one pickle from its beginning to its STOP. Raises Damaged for whatever is not one."""
    machine = _Machine()
    collecting = gc.isenabled()
    gc.disable()  # it would look through the growing millions of values again and again: most of the time it took
    try:
        for opcode, argument, _ in pickletools.genops(data):
            _STEPS.get(opcode.name, _Machine.push)(machine, argument)
    except OSError:
        raise
    except Exception as err:  # a byte string has many ways not to be a pickle, and pickletools many to say so
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
        self._memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        """Most opcodes push the literal that they carry."""
        self._stack.append(value)

    def nothing(self, _: Any) -> None:
        """What tells the reader of bytes something."""

    def stop(self, _: Any) -> None:
        self.result.value = self._stack.pop()

    def pop(self, _: Any) -> None:
        self._stack.pop()

    def pop_mark(self, _: Any) -> None:
        self._to_mark()

    def duplicate(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, at: Any) -> None:
        self._memo[int(at)] = self._stack[-1]

    def get(self, at: Any) -> None:
        self._stack.append(self._memo[int(at)])

    def make_list(self, _: Any) -> None:
        self._stack.append(self._to_mark())

    def make_dict(self, _: Any) -> None:
        made = Thing("dict")
        made.pairs += _pairs(self._to_mark())
        self._stack.append(made)

    def make_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._to_mark()))

    def make_frozenset(self, _: Any) -> None:
        self._stack.append(Thing("frozenset", tuple(self._to_mark())))

    def append(self, _: Any) -> None:
        self._extend([self._stack.pop()])

    def extend(self, _: Any) -> None:
        self._extend(self._to_mark())

    def set_item(self, _: Any) -> None:
        values = self.take(2)
        self._stack[-1].pairs += _pairs(values)

    def set_items(self, _: Any) -> None:
        values = self._to_mark()
        self._stack[-1].pairs += _pairs(values)

    def name(self, words: Any) -> None:
        self._stack.append(Thing(".".join(str(words).split(" ", 1))))

    def stack_name(self, _: Any) -> None:
        module, attribute = self.take(2)
        self._stack.append(Thing(f"{module}.{attribute}"))

    def extension(self, number: Any) -> None:
        self._stack.append(Thing(f"extension {number}"))

    def instance(self, words: Any) -> None:
        self._stack.append(Thing(".".join(str(words).split(" ", 1)), tuple(self._to_mark())))

    def object(self, _: Any) -> None:
        made, *args = self._to_mark()
        self._stack.append(Thing(made.name, tuple(args)))

    def call(self, _: Any) -> None:
        made, args = self.take(2)
        self._stack.append(Thing(made.name, args))

    def call_with_names(self, _: Any) -> None:
        made, args, _names = self.take(3)
        self._stack.append(Thing(made.name, args))

    def build(self, _: Any) -> None:
        state = self._stack.pop()
        self._stack[-1].state = state

    def persistent_text(self, identity: Any) -> None:
        self.result.persistent.append(identity)
        self._stack.append(Thing("persistent", identity))

    def persistent(self, _: Any) -> None:
        self.persistent_text(self._stack.pop())

    def buffer(self, _: Any) -> None:
        self._stack.append(Thing("buffer"))

    def take(self, count: int) -> list[Any]:
        """Take the topmost values, in the order in which they were pushed."""
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
        (target.items if isinstance(target, Thing) else target).extend(values)


def _pairs(values: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(values[::2], values[1::2], strict=True)


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
    "EMPTY_DICT": lambda machine, _: machine.push(Thing("dict")),
    "EMPTY_SET": lambda machine, _: machine.push(Thing("set")),
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
