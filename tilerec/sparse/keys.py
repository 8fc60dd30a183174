"""Feature names of a keyed tensor, checked and indexed once and shared by all batches with these names.

Glossary
    key     the name of a feature; the constructor accepts each at most once
    Keys    an ordered, hashable list of keys with a name -> position map
    copies  positions with one name and the same bags, from a permutation that repeats a key

Thousands of batches have the same keys. So all results that depend on names alone are computed once per tuple of names:
the map, the check for repeats, the names of a permutation or of a split's parts. `Keys` is registered as a constant:
`torch.compile` guards on its equality and folds positions into the graph.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, final, overload

import torch

from tilerec.errors import InputError
from tilerec.torch_private import pytree

_CACHE_SIZE = 64
"""Most permutations, and most splits, that one `Keys` caches; the cache is cleared when it is full."""


class UnknownKeyError(InputError, KeyError):
    """Lookup of a missing key. Also a `KeyError`, as for mappings."""

    __str__ = ValueError.__str__


@final
class Keys(Sequence[str]):
    """Ordered feature names; repeated names only with `copies`.

    `text` is the `repr` of the names: a compiled program that reads it guards one value, and not one per name.

    Raises `InputError` for a name that is not a string, and for a repeated name. With `copies=True` names may repeat:
    their bags are copies.
    """

    __slots__ = ("_hash", "_index", "_selections", "_splits", "names", "text")

    def __init__(self, names: Sequence[str], copies: bool = False) -> None:
        if isinstance(names, str):
            raise InputError(f"keys: got the string {names!r}; expected a list of feature names. Write [{names!r}].")
        self.names = tuple(names)
        self._index = {name: position for position, name in enumerate(self.names)}
        if not copies and len(self._index) != len(self.names):
            raise InputError(_describe_repeats(self.names))
        for name in self.names:
            if not isinstance(name, str):
                raise InputError(
                    f"keys: got {name!r}, a {type(name).__name__}; expected feature names (str). Pass strings."
                )
        self.text = repr(self.names)
        # Not under Dynamo, which cannot trace it in torch 2.11.
        self._hash = 0 if torch.compiler.is_compiling() else hash(self.names)
        self._selections: dict[tuple[int, ...], Keys] = {}
        self._splits: dict[tuple[int, ...], tuple[Keys, ...]] = {}

    @staticmethod
    def of(names: Sequence[str]) -> Keys:
        """Return the `Keys` with these names, from a cache if possible."""
        if isinstance(names, Keys):
            return names
        if isinstance(names, str) or torch.compiler.is_compiling():
            return Keys(names)
        return _intern(tuple(names), False)

    @staticmethod
    def known(names: Sequence[str]) -> Keys:
        """Return the `Keys` with names taken from another `Keys`: repeated names are copies."""
        if isinstance(names, Keys):
            return names
        return Keys(names, copies=True) if torch.compiler.is_compiling() else _intern(tuple(names), True)

    def position(self, name: str) -> int:
        """Return the position of `name` (of copies the last); `UnknownKeyError` suggests the most similar keys."""
        position = self._index.get(name)
        if position is None:
            raise UnknownKeyError(_describe_missing(name, self.names))
        return position

    def positions(self) -> dict[str, int]:
        """Return a new dict: name -> position."""
        return dict(self._index)

    def select(self, indices: Sequence[int]) -> Keys:
        """Return the keys at `indices`, in that order; repeated indices make copies."""
        if torch.compiler.is_compiling():
            return self._select(indices)
        chosen = tuple(indices)
        selected = self._selections.get(chosen)
        if selected is None:
            if len(self._selections) >= _CACHE_SIZE:
                self._selections.clear()
            selected = self._selections[chosen] = self._select(chosen)
        return selected

    def split(self, segments: Sequence[int]) -> tuple[Keys, ...]:
        """Split into parts of `segments[i]` neighbouring keys; the sizes must sum to the number of keys."""
        if torch.compiler.is_compiling():
            return self._split(segments)
        sizes = tuple(segments)
        parts = self._splits.get(sizes)
        if parts is None:
            if len(self._splits) >= _CACHE_SIZE:
                self._splits.clear()
            parts = self._splits[sizes] = self._split(sizes)
        return parts

    def _select(self, indices: Sequence[int]) -> Keys:
        for index in indices:
            if not 0 <= index < len(self.names):
                raise InputError(
                    f"permute: got index {index}; expected one in [0, {len(self.names)}), the positions of the keys. "
                    "Correct indices."
                )
        return Keys.known([self.names[index] for index in indices])

    def _split(self, segments: Sequence[int]) -> tuple[Keys, ...]:
        if any(size < 0 for size in segments) or sum(segments) != len(self.names):
            raise InputError(
                f"split: got segments {shorten(segments)} with the sum {sum(segments)}; expected non-negative sizes "
                f"that sum to the "
                f"number of keys, {len(self.names)}. Correct segments."
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
        return self._hash or hash(self.names)

    def __repr__(self) -> str:
        return f"Keys({list(self.names)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Omit the hash, since string hashes differ between processes, and the caches, which are not part of the value.
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
    return f"keys: got {repeated!r} at positions {shorten(where)}; expected each feature once. Rename or merge them."


def _describe_missing(name: object, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, names, n=3) if isinstance(name, str) else []
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the keys are {shorten(names)}."
    return f"Unknown key {name!r}: {hint}"


def shorten(items: Sequence[object], limit: int = 8) -> str:
    """Format a list for a message: the first `limit` items, and the number of all."""
    if len(items) <= limit:
        return str(list(items))
    return f"[{', '.join(map(repr, items[:limit]))}, … {len(items)} in all]"


pytree.register_constant(Keys)
