"""Ranks that wait for each other: a cycle of waits ends in an error that names them, and not at a time-out.

    rank 0 waits in reshard            for rank 1, which has not called it
    rank 1 waits in all_to_all 'ids'   for rank 0, which has not called it

Nouns
  call    one collective of a channel: the ranks' n-th calls belong together
  wait    a rank that has made a call and cannot go on; its peers that have not made theirs keep it there

A cycle that ends at this rank is certain, whenever its records were written: this rank has not made the call for which
the last one waits, so that one still waits there; so has that one not made the call of the one before it; and so on.
That holds where a rank makes its calls from one thread: a second one could still come.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch.distributed as dist

_LAST_WORDS = "tilerec/last_words"
_READ_AT_ONCE = 16
"""Peers whose records a rank reads in one look: of many ranks that wait, some read the one that matters."""
_LONGEST_PAUSE = 32
"""Looks of a wait that are left out between two that read records, at most."""


def cycle_through(rank: int, waits_for: Callable[[int], Iterable[int]]) -> list[int]:
    """Return the shortest cycle of waits through a rank, which it begins with; empty if there is none.

    Args:
        waits_for: the ranks for which a rank waits; none for one that does not wait.
    """
    before: dict[int, int] = {}
    front = [rank]
    while front:
        found: list[int] = []
        for one in front:
            for other in waits_for(one):
                if other == rank:
                    path = [one]
                    while path[-1] != rank:
                        path.append(before[path[-1]])
                    return path[::-1]
                if other not in before:
                    before[other] = one
                    found.append(other)
        front = found
    return []


def cycle_text(cycle: list[int], titles: Mapping[int, str]) -> str:
    """A cycle of waits in words."""
    turns = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    waits = [f"rank {one} waits in {titles[one]}, which rank {other} has not called" for one, other in turns]
    return f"{'; '.join(waits)}. Every rank makes the same calls in the same order."


class Call(NamedTuple):
    """One collective of a rank.

    Attributes:
        title: what is called, in errors.
        channel: its name, the same on all ranks. number: among the calls of the channel.
        ranks: of the channel, in the numbers of the widest group.
    """

    title: str
    channel: str
    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Record:
    """The wait of a peer, and how many calls of each channel it had made."""

    call: Call
    begun: Mapping[str, int] = field(default_factory=dict)

    def has_made(self, call: Call) -> bool:
        return self.begun.get(call.channel, 0) > call.number

    @staticmethod
    def read(text: bytes) -> _Record:
        title, channel, number, ranks, begun = json.loads(text)
        return _Record(Call(title, channel, number, tuple(ranks)), begun)

    def written(self) -> str:
        call = self.call
        return json.dumps([call.title, call.channel, call.number, call.ranks, self.begun])


@final
class Watch:
    """The waits and the last words of the ranks of a process group, in its store; shared by its channels.

    Nothing is written or read while calls end soon.

    Args:
        store: of all ranks.
        rank: of this one in it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store = store
        self._rank, self._size = rank, size
        self._begun: dict[str, int] = {}
        self._threads: set[int] = set()
        self._words: str | None = None
        self._waits: Call | None = None  # that the record is of
        self._looks = 0

    def begin(self, title: str, channel: str, ranks: tuple[int, ...]) -> Call:
        """Count a call of a channel."""
        number = self._begun.get(channel, 0)
        self._begun[channel] = number + 1
        self._threads.add(threading.get_ident())
        return Call(title, channel, number, ranks)

    def look(self, call: Call) -> str:
        """Return why this rank waits in vain, in words; "" if it may not. Called now and then by a rank that waits.

        The first look writes this rank's record, later ones read those of peers, ever more rarely.
        """
        if len(self._threads) > 1:
            return ""
        try:
            if self._waits != call:
                self._waits, self._looks = call, 0
                self.store.set(_key(self._rank), _Record(call, self._begun).written())
                return ""
            self._looks += 1
            pause = min(_LONGEST_PAUSE, 1 << (self._looks.bit_length() - 1))
            return self._judged(call) if self._looks % pause == 0 else ""
        except RuntimeError:  # the store died with the rank that held it: the call will fail
            return ""

    def _judged(self, call: Call) -> str:
        peers = [rank for rank in range(self._size) if rank != self._rank]
        if len(peers) > _READ_AT_ONCE:
            others = [rank for rank in call.ranks if rank != self._rank]
            peers = random.sample(others, min(len(others), _READ_AT_ONCE))
        records = self._records(peers)
        for rank, record in records.items():
            theirs = record.call
            same = (theirs.channel, theirs.number) == (call.channel, call.number)
            if same and theirs.title != call.title:
                return (
                    f"rank {self._rank} is in {call.title} and rank {rank} in {theirs.title}. Every rank makes the "
                    "same calls in the same order."
                )
        records[self._rank] = _Record(call, self._begun)

        def waits_for(rank: int) -> Collection[int]:
            own = records[rank].call
            return [r for r in own.ranks if r in records and r != rank and not records[r].has_made(own)]

        cycle = cycle_through(self._rank, waits_for)
        return (
            cycle_text(cycle, {rank: record.call.title for rank, record in records.items()}) if cycle else ""
        )

    def _records(self, ranks: Iterable[int]) -> dict[int, _Record]:
        found = [rank for rank in ranks if self.store.check([_key(rank)])]
        return {rank: _Record.read(self.store.get(_key(rank))) for rank in found}

    # -- the last words of a rank that has given up ------------------------------------------------------------

    def leave_words(self, words: str) -> None:
        """Leave words for the peers, whose calls raise with them from now on."""
        self._words = self._words or words
        self.store.set(_LAST_WORDS, words[:10_000])

    def last_words(self, *, look: bool) -> str | None:
        """Return the words of a rank that has given up, if there are any. `look`: for new ones, in the store."""
        if self._words is None and look:
            try:
                if self.store.check([_LAST_WORDS]):
                    self._words = self.store.get(_LAST_WORDS).decode(errors="replace")
            except RuntimeError:
                # The store died with the rank that held it: there are no words.
                return None
        return self._words


def _key(rank: int) -> str:
    return f"tilerec/waits/{rank}"
