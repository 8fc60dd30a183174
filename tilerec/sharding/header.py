"""Check, inside the header exchange, that the lookups of all ranks agree; sizes of the headers.

    header of a pair of ranks    word 0: flags, and above them a digest of `LookupFacts`; then sizes (`route.py`)

If digests differ, every rank receives one that differs from its own, so every rank raises before any id is sent. A rank
that calls another collection sends the header of that collection. Between two ranks, the headers of all collections of
a channel therefore have one size, that of the largest.
"""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, cast

from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.storage.shared_param_group import SharedParamGroup

FLAG_BITS = 2
"""Bits of the first word below the digest."""
TRAINED, ATTACHED = 1, 2
"""Bits of `LookupFacts.training`: the weight requires a gradient; an attached optimizer uses it in the backward."""

Described = tuple[str, bool, bytes, dict[str, dict[str, str]]]
"""`LookupFacts` in comparable form: collection, trains, training, and hyper-parameters by table."""


@dataclass(frozen=True)
class LookupFacts:
    """Facts of a lookup that must be equal on all ranks.

    Attributes:
        number: number of the collection on its channel.
        collection: its name in errors.
        tables: names, in the layout's order.
        trains: a backward pass may follow: gradients are enabled, and some table is trained.
        training: one byte per table: how this rank trains it (`TRAINED`, `ATTACHED`).
        rules: hyper-parameters of the attached optimizers, by table; empty if nothing trains.
    """

    number: int = 0
    collection: str = ""
    tables: tuple[str, ...] = ()
    trains: bool = False
    training: bytes = b""
    rules: Mapping[str, SharedParamGroup] = field(default_factory=dict)

    def digest(self) -> int:
        """Return 29 bits, which fit above the flags of a header's first word (int32)."""
        words = array("q", [self.number, self.trains, *[rule.digest() for rule in self.rules.values()]])
        return zlib.crc32(words, zlib.crc32(self.training)) & 0x1FFFFFFF

    def described(self) -> Described:
        """Return the facts in a form that other ranks compare with their own."""
        rules = {name: {key: repr(value) for key, value in rule.numbers().items()} for name, rule in self.rules.items()}
        return self.collection, self.trains, self.training, rules


def raise_difference(group: Group, ranks: Sequence[int], own: LookupFacts) -> NoReturn:
    """Raise an `InputError` for the first difference between the ranks' facts, the same one on every rank. Collective.

    Args:
        ranks: numbers of the group's ranks in errors.
    """
    everyone = cast("list[Described]", group.all_gather_object(own.described()))
    first = everyone[0]
    place, other = next((r, facts) for r, facts in enumerate(everyone) if facts != first)
    here, there = ranks[0], ranks[place]
    if other[0] != first[0]:
        raise InputError(
            f"Lookups: rank {here} looks up {first[0]} and rank {there} {other[0]}; expected the same collection on "
            "all ranks. Call collections in one order on all ranks (a set's order differs from process to process)."
        )
    if other[2] != first[2]:
        t = next(t for t, (a, b) in enumerate(zip(first[2], other[2], strict=True)) if a != b)
        raise InputError(
            f"Table '{own.tables[t]}': it {_training(first[2][t])} on rank {here} and {_training(other[2][t])} on rank "
            f"{there}, so their gradients would not be summed; freeze tables (requires_grad_) and attach optimizers on "
            "all ranks alike."
        )
    if other[1] != first[1]:
        modes = ["trains" if facts[1] else "evaluates (gradients are disabled)" for facts in (first, other)]
        raise InputError(
            f"Lookups of {first[0]}: rank {here} {modes[0]} and rank {there} {modes[1]}, so a backward pass would wait "
            "for ranks that do not call it; train on all ranks, or call it under torch.no_grad() on all."
        )
    name = next(name for name in first[3] if first[3][name] != other[3].get(name))
    key = next(key for key in first[3][name] if first[3][name][key] != other[3][name].get(key))
    values: dict[str, list[int]] = {}
    for rank, facts in zip(ranks, everyone, strict=True):
        values.setdefault(facts[3][name].get(key, "nothing"), []).append(rank)
    listed = ", ".join(f"{value} on {_ranks(own_ranks)}" for value, own_ranks in values.items())
    raise InputError(
        f"Table '{name}': its optimizer's {key} is {listed}; expected one value, as every rank updates its part of the "
        "table by its own. Give all ranks the same (a schedule by a loss needs the loss of all ranks)."
    )


def _training(word: int) -> str:
    if not word & TRAINED:
        return "is frozen"
    return "trains with an attached optimizer" if word & ATTACHED else "trains without an attached optimizer"


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}"


class HeaderSizes:
    """Sizes of the headers between this rank and its peers, on one channel, in int32 words.

    All ranks number their collections and change the sizes in the same order.
    """

    def __init__(self) -> None:
        self.version = 0  # increases when the sizes may have changed
        self._sizes: dict[int, tuple[list[int], list[int]]] = {}
        self._count = 0
        self._unit = 1
        self.carries_notes = False

    def number(self) -> int:
        """Return the next collection's number."""
        self._count += 1
        return self._count - 1

    def enter(self, number: int, out: Sequence[int], into: Sequence[int], unit: int = 1) -> None:
        """Reserve room for a collection's header.

        Args:
            out, into: words to and from each rank, [W].
            unit: words of an element; all sizes become multiples of it.
        """
        self._sizes[number] = list(out), list(into)
        self._unit = max(self._unit, unit)
        self.version += 1

    def carry_notes(self) -> None:
        """Reserve the last word of each header for the note of a route; later calls do nothing."""
        if not self.carries_notes:
            self.carries_notes = True
            self.version += 1

    def sizes(self, out: Sequence[int], into: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the size of the channel's headers, given this one: words to and from each rank, [W]."""
        every = [(out, into), *self._sizes.values()]
        unit, note = self._unit, int(self.carries_notes)
        widest = ([max(words) for words in zip(*side, strict=True)] for side in zip(*every, strict=True))
        rounded = [[-(-(words + note) // unit) * unit for words in side] for side in widest]
        return rounded[0], rounded[1]


_ROOMS: weakref.WeakKeyDictionary[Group, HeaderSizes] = weakref.WeakKeyDictionary()


def header_sizes_of(channel: Group) -> HeaderSizes:
    """Return the `HeaderSizes` of a channel; create it on first use."""
    return _ROOMS.setdefault(channel, HeaderSizes())
