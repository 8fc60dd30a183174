"""Pickles read as data: the opcodes are interpreted here, and nothing that a pickle names is imported or called.

    pickle of Point(x=1)    ->    Made(Global("geometry.Point"), (), state={"x": 1})

Only the opcodes of plain data, of objects with a state and of calls with plain arguments are admitted, and only the
globals that the caller lists. A call stays a record of the call.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, final

from tilerec.errors import InputError


class Global(NamedTuple):
    """A module's member, by name: `torch.float32`. It is not imported."""

    name: str


@final
class Made:
    """An object as its pickle describes it.

    Args:
        kind: the class or function. arguments: of its call. state: of the object; None if it has none.
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = None


class _Refused(Exception):
    """What was found, and what is expected instead."""


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_SKIPPED = {"PROTO", "FRAME"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
ORDERED_DICT = "collections.OrderedDict"
_ENUM_MEMBER = "builtins.getattr"
"""Called with a class and a name: a member of an enumeration, as Python 3.11.0 to 3.11.3 write it."""


def parse_pickle(data: bytes, what: str, admitted: Collection[str]) -> Any:
    """Return the contents of a pickle: None, bools, numbers, strings, tuples, lists, dicts, `Global` and `Made`.

    Args:
        what: the file, for errors. admitted: full names of the globals that it may have.

    Raises:
        InputError: it has another global or opcode, or is no pickle.
    """
    machine = _Machine(frozenset(admitted))
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.pop()
            machine.run(opcode.name, argument)
        raise _Refused("no end", "a whole pickle")
    except _Refused as refused:
        got, expected = refused.args
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        got, expected = f"'{error}' in its pickle", "a whole pickle"
    raise InputError(
        f"{what}: got {got:.200}; expected {expected}. Nothing in it was run. Check where the file is from."
    )


@final
class _Machine:
    """The stack machine of pickles, which makes records in place of objects."""

    def __init__(self, admitted: frozenset[str]) -> None:
        self._admitted = admitted
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # stacks below the marks
        self._memo: dict[int, Any] = {}
        self._steps: dict[str, Callable[[Any], None]] = {
            "MARK": self._mark,
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            "PUT": self._put,
            "BINPUT": self._put,
            "LONG_BINPUT": self._put,
            "GET": self._get,
            "BINGET": self._get,
            "LONG_BINGET": self._get,
            "EMPTY_TUPLE": lambda _: self._push(()),
            "EMPTY_LIST": lambda _: self._push([]),
            "EMPTY_DICT": lambda _: self._push({}),
            "TUPLE": lambda _: self._push(tuple(self._popped_to_mark())),
            "APPEND": lambda _: self._extend([self.pop()]),
            "APPENDS": lambda _: self._extend(self._popped_to_mark()),
            "SETITEM": lambda _: self._set_items(self._popped(2)),
            "SETITEMS": lambda _: self._set_items(self._popped_to_mark()),
            "GLOBAL": lambda argument: self._global(*str(argument).split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._global(*self._popped(2)),
            "NEWOBJ": lambda _: self._make(*self._popped(2)),
            "REDUCE": lambda _: self._make(*self._popped(2)),
            "BUILD": lambda _: self._build(self.pop()),
        }

    def run(self, name: str, argument: Any) -> None:
        """Interpret one opcode."""
        if name in self._steps:
            self._steps[name](argument)
        elif name in _ARGUMENTS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self._stack.append(tuple(self._popped(_TUPLES[name])))
        elif name not in _SKIPPED:
            raise _Refused(f"the opcode {name}", "opcodes of plain data")

    def pop(self) -> Any:
        """Remove and return the newest value."""
        return self._stack.pop()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _popped(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise _Refused("an empty stack", "a whole pickle")
        found = self._stack[-count:]
        del self._stack[-count:]
        return found

    def _mark(self, _: Any) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _popped_to_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._outer.pop()
        return found

    def _put(self, number: int) -> None:
        self._memo[int(number)] = self._stack[-1]

    def _get(self, number: int) -> None:
        self._stack.append(self._memo[int(number)])

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise _Refused("items of something else than a list", "a list")
        self._stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise _Refused("items of something else than a dict", "a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of nested tuples can take longer than the age of the universe.
            if type(key) not in (str, int, Made):
                raise _Refused(f"a {type(key).__name__} as a key", "strings, numbers and objects as keys")
            target[key] = value

    def _global(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}"
        if full not in self._admitted and full not in (ORDERED_DICT, _ENUM_MEMBER):
            raise _Refused(f"the global {full:.100}", f"one of the {len(self._admitted)} names that such a file needs")
        self._stack.append(Global(full))

    def _make(self, kind: Any, arguments: Any) -> None:
        if type(kind) is not Global or type(arguments) is not tuple:
            raise _Refused("a call of something that is no global", "calls of classes by name")
        if kind.name == _ENUM_MEMBER:
            kind, arguments = arguments[0], arguments[1:]
            if type(kind) is not Global or len(arguments) != 1 or type(arguments[0]) is not str:
                raise _Refused(f"{_ENUM_MEMBER} of something that is no class", "members of enumerations")
        self._stack.append({} if kind.name == ORDERED_DICT and not arguments else Made(kind.name, arguments))

    def _build(self, state: Any) -> None:
        target = self._stack[-1]
        if type(target) is not Made or target.state is not None:
            raise _Refused("a state of something that is no object", "a state of each object")
        target.state = state
