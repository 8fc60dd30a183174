"""Deadlock detection: a cycle of waiting ranks raises an error that names them, long before the time-out.

    rank 0 waits in reshard            for rank 1, which has not called it
    rank 1 waits in all_to_all 'ids'   for rank 0, which has not called it

Nouns
  call    one collective of a channel: the ranks' n-th calls belong together
  wait    a rank that has made a call and is blocked by peers that have not made theirs

A cycle through this rank is certain even if its records are old. This rank has not made the call for which the last
rank of the cycle waits, so that rank still waits there. So the last rank has not made the call for which the rank
before it waits, and so on. This holds if a rank makes its calls from one thread: a second thread could still make one.
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
_NAMED = 16
"""Maximum number of missing ranks that an error names."""
LOST_RANK = "tilerec/lost_rank"
"""Key without a prefix at which a launcher leaves the failure message of a rank that died without one."""
_READ_AT_ONCE = 16
"""Maximum number of peers whose records a rank reads in one look; of many waiting ranks, some read the decisive one."""
_LONGEST_PAUSE = 32
"""Maximum number of looks from one that reads records to the next."""


def cycle_through(rank: int, waits_for: Callable[[int], Iterable[int]]) -> list[int]:
    """Return the shortest cycle of waits that begins with `rank`; empty if there is none.

    Args:
        waits_for: returns the ranks for which a rank waits; none for a rank that does not wait.
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
    """Return the text that describes a cycle of waits."""
    turns = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    waits = [f"rank {one} waits in {titles[one]}, which rank {other} has not called" for one, other in turns]
    return f"{'; '.join(waits)}. Every rank makes the same calls in the same order."


class Call(NamedTuple):
    """One collective of a rank.

    Attributes:
        title: name of the call in errors.
        channel: name of its channel, the same on all ranks.
        number: its number among the calls of the channel.
        ranks: ranks of the channel, as numbers in the widest group.
    """

    title: str
    channel: str
    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Record:
    """The call in which a peer waits, and the number of calls that it had made per channel."""

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
class DeadlockDetector:
    """Waits and failure messages ("last words") of the ranks of a process group, in its store; shared by its channels.

    The store is neither written nor read while calls end soon.

    Args:
        store: the store of all ranks.
        rank: this rank's number in the process group.
        size: number of ranks of the process group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store = store
        self._whole = store  # that of the launcher
        while isinstance(self._whole, dist.PrefixStore):
            self._whole = self._whole.underlying_store
        self._rank, self._size = rank, size
        self._begun: dict[str, int] = {}
        self._threads: set[int] = set()
        self._words: str | None = None
        self._waits: Call | None = None  # the call in this rank's record
        self._looks = 0
        self._reports = False

    def begin(self, title: str, channel: str, ranks: tuple[int, ...]) -> Call:
        """Count a call of a channel and return it."""
        number = self._begun.get(channel, 0)
        self._begun[channel] = number + 1
        self._threads.add(threading.get_ident())
        return Call(title, channel, number, ranks)

    def look(self, call: Call) -> str:
        """Return a text that explains why this wait cannot end; "" if it may end. A waiting rank calls it repeatedly.

        The first look writes this rank's record. Later looks read the records of peers, at growing intervals.
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
            return self._verdict(call) if self._looks % pause == 0 else ""
        except RuntimeError:  # the store died with the rank that hosted it: the call will fail
            return ""

    def _verdict(self, call: Call) -> str:
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
        return cycle_text(cycle, {rank: record.call.title for rank, record in records.items()}) if cycle else ""

    def _records(self, ranks: Iterable[int]) -> dict[int, _Record]:
        found = [rank for rank in ranks if self.store.check([_key(rank)])]
        return {rank: _Record.read(self.store.get(_key(rank))) for rank in found}

    # -- stages of ranks, for the time-out -----------------------------------------------------------------------

    def report(self, store: dist.Store, stage: str) -> None:
        """Publish the stage and the number of calls of this rank. Another thread may call it, with its own store."""
        self._reports = True
        store.set(_stage_key(self._rank), json.dumps([stage[:200], dict(self._begun)]))

    def missing(self, call: Call | None) -> str:
        """Return a text that names the ranks that are behind this one, with their last stages.

        "" if none is known, or if this rank does not report: then the others do not, either.

        Args:
            call: whose wait has reached the time-out; None for a collective that torch has called: then ranks are
                behind that have made fewer calls of any channel.
        """
        found: list[str] = []
        if not self._reports:
            return ""
        for rank in call.ranks if call is not None else range(self._size):
            if rank == self._rank or len(found) == _NAMED:
                continue
            stage = "it has not begun its steps"
            begun: dict[str, int] = {}
            try:
                if self.store.check([_stage_key(rank)]):
                    last, begun = json.loads(self.store.get(_stage_key(rank)))
                    stage = f"its last stage is {last}"
            except RuntimeError:  # the store died with the rank that hosted it
                return ""
            if call is not None:
                behind = begun.get(call.channel, 0) <= call.number
            else:
                behind = sum(begun.values()) < sum(self._begun.values())
            if behind:
                found.append(f"rank {rank} is missing: {stage}")
        return "; ".join(found)

    # -- failure messages of ranks that have aborted -----------------------------------------------------------

    def leave_words(self, words: str) -> None:
        """Publish a failure message; from now on calls of all peers raise with it."""
        self._words = self._words or words
        self.store.set(_LAST_WORDS, words[:10_000])

    def last_words(self, *, look: bool) -> str | None:
        """Return the failure message of a rank that has aborted, or None. `look`: check the store for a new one."""
        if self._words is None and look:
            try:
                for store, key in ((self.store, _LAST_WORDS), (self._whole, LOST_RANK)):
                    if self._words is None and store.check([key]):
                        self._words = store.get(key).decode(errors="replace")
            except RuntimeError:
                # The store died with the rank that hosted it: there is no message.
                return None
        return self._words


def _stage_key(rank: int) -> str:
    return f"tilerec/stages/{rank}"


def _key(rank: int) -> str:
    return f"tilerec/waits/{rank}"
