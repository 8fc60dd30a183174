"""The names of a keyed tensor's features, checked and indexed once and shared by every batch that has them.

Glossary
    key     the name of a feature; a batch is made with each at most once
    Keys    an ordered, hashable list of them with a name -> position map
    copies  what a permutation that names a key twice makes: positions with one name and the same bags

A batch arrives thousands of times with the same keys, so everything that depends on names alone (the map, the check for
repeats, the names of a permutation or of a split's parts) is worked out once per tuple of names. `Keys` is
registered as a constant: `torch.compile` guards on its equality and folds positions into the graph.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, final, overload

import torch

from tilerec.errors import InputError
from tilerec.torch_private import pytree

_REMEMBERED = 64
"""How many permutations and splits one `Keys` remembers before it starts afresh."""


class UnknownKeyError(InputError, KeyError):
    """A key that is not there. Also a `KeyError`, as a mapping's reader expects."""

    __str__ = ValueError.__str__


@final
class Keys(Sequence[str]):
    """Ordered feature names, distinct but for `copies`.

    Raises `InputError` for a repeated name (unless `copies` says that its bags are copies) or one that is not a string.
    """

    __slots__ = ("_hash", "_index", "_selections", "_splits", "names")

    def __init__(self, names: Sequence[str], copies: bool = False) -> None:
        if isinstance(names, str):
            raise InputError(
                f"keys: got the string {names!r}; wanted a list of feature names; write [{names!r}]."
            )
        self.names = tuple(names)
        self._index = {name: position for position, name in enumerate(self.names)}
        if not copies and len(self._index) != len(self.names):
            raise InputError(_describe_repeats(self.names))
        for name in self.names:
            if not isinstance(name, str):
                raise InputError(f"keys: {name!r} is a {type(name).__name__}; wanted feature names (str).")
        self._hash = hash(self.names)
        self._selections: dict[tuple[int, ...], Keys] = {}
        self._splits: dict[tuple[int, ...], tuple[Keys, ...]] = {}

    @staticmethod
    def of(names: Sequence[str]) -> Keys:
        """The `Keys` with these names: the one made before, where there is one."""
        if isinstance(names, Keys):
            return names
        if isinstance(names, str) or torch.compiler.is_compiling():
            return Keys(names)
        return _intern(tuple(names), False)

    @staticmethod
    def known(names: Sequence[str]) -> Keys:
        """The `Keys` with names that came out of another `Keys`: repeated ones are copies."""
        if isinstance(names, Keys):
            return names
        return Keys(names, copies=True) if torch.compiler.is_compiling() else _intern(tuple(names), True)

    def position(self, name: str) -> int:
        """Where `name` stands (of copies the last); `UnknownKeyError` names the closest keys there are."""
        position = self._index.get(name)
        if position is None:
            raise UnknownKeyError(_describe_missing(name, self.names))
        return position

    def positions(self) -> dict[str, int]:
        """A name -> position map; the caller's own copy."""
        return dict(self._index)

    def select(self, indices: Sequence[int]) -> Keys:
        """The keys at `indices`, in that order; an index given twice makes copies."""
        if torch.compiler.is_compiling():
            return self._select(indices)
        chosen = tuple(indices)
        selected = self._selections.get(chosen)
        if selected is None:
            if len(self._selections) >= _REMEMBERED:
                self._selections.clear()
            selected = self._selections[chosen] = self._select(chosen)
        return selected

    def split(self, segments: Sequence[int]) -> tuple[Keys, ...]:
        """Neighbouring keys, `segments[i]` of them in part i; all keys must be dealt."""
        if torch.compiler.is_compiling():
            return self._split(segments)
        sizes = tuple(segments)
        parts = self._splits.get(sizes)
        if parts is None:
            if len(self._splits) >= _REMEMBERED:
                self._splits.clear()
            parts = self._splits[sizes] = self._split(sizes)
        return parts

    def _select(self, indices: Sequence[int]) -> Keys:
        for index in indices:
            if not 0 <= index < len(self.names):
                raise InputError(
                    f"permute: index {index} is outside [0, {len(self.names)}), the positions of the keys."
                )
        return Keys.known([self.names[index] for index in indices])

    def _split(self, segments: Sequence[int]) -> tuple[Keys, ...]:
        if any(size < 0 for size in segments) or sum(segments) != len(self.names):
            raise InputError(
                f"split: segments {shorten(segments)} sum to {sum(segments)}; wanted non-negative sizes "
                f"that sum to the "
                f"number of keys, {len(self.names)}."
            )
        parts = []
        start = 0
        for size in segments:
            parts.append(Keys.known(self.names[start : start + size]))
            start += size
        return tuple(parts)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self.names[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Keys) and self.names == other.names)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Keys({list(self.names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # String hashes differ between processes, and what is remembered is not part of the value.
        return Keys.known, (self.names,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Keys:
        return self

    def __copy__(self) -> Keys:
        return self


@functools.lru_cache(maxsize=256)
def _intern(names: tuple[str, ...], copies: bool) -> Keys:
    return Keys(names, copies)


def _describe_repeats(names: tuple[str, ...]) -> str:
    repeated = max(names, key=names.count)
    where = [position for position, name in enumerate(names) if name == repeated]
    return f"keys: {repeated!r} appears at positions {shorten(where)}; wanted each feature once; rename or merge them."


def _describe_missing(name: object, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, names, n=3) if isinstance(name, str) else []
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the keys are {shorten(names)}."
    return f"Unknown key {name!r}: {hint}"


def shorten(items: Sequence[object], limit: int = 8) -> str:
    """A list for a message: the first `limit` items."""
    if len(items) <= limit:
        return str(list(items))
    return f"[{', '.join(map(repr, items[:limit]))}, … {len(items)} in all]"


pytree.register_constant(Keys)
