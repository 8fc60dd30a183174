"""`ThreadWorld`: ranks that are threads of one process. Debuggers work, and mismatched calls raise at once.

Glossary
    world       W virtual ranks, their channels, and the failure that ends the world for all of them
    channel     ranks whose calls are matched: the k-th call of every rank is one call
    call        gathers one argument per rank; the last rank to arrive copies the data for all
    post        one side of a point-to-point message that waits for the other side

    rank 0:  all_to_all "ids"   all_reduce "x"
    rank 1:  all_to_all "ids"   all_to_all "rows"      <- call 1 differs: both ranks raise, naming both

No rank waits for ever. A failed rank ends the world for all ranks. A rank that has returned and a cycle of waits over
several channels are detected at once. Every wait ends at the time-out. The last rank to arrive copies the tensors, so
an output is complete on all ranks at the same time, and an all-reduce adds in the order of the ranks.

Virtual ranks train with CPU tensors. Autograd runs the backward of CPU tensors on the thread that called it. It runs
that of GPU tensors on one thread per device, where a waiting rank would block the others. Forward passes may use GPU
tensors: events order the streams of the calling ranks and of the rank that copies.

Legend: W ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from tilerec.comms.deadlock import cycle_text, cycle_through
from tilerec.comms.group import Group
from tilerec.comms.traffic import Traffic
from tilerec.errors import CommsError, ConfigError
from tilerec.ops.backends import reused_empty
from tilerec.ops.runtime.gpu import is_gpu


@final
class ThreadWorld:
    """W virtual ranks. The thread of a rank communicates through `world.group(rank)`.

    Args:
        size: number of ranks, W >= 1.
        timeout_s: maximum time that a rank waits for its peers, in seconds.

    Any thread may use any rank's group, one thread at a time.
    """

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        if size < 1 or not timeout_s > 0:
            raise ConfigError(
                f"ThreadWorld: got size {size}, timeout_s {timeout_s}; expected at least one rank and a positive time."
            )
        self.size = size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        # The failure that ended the world: its text, and the original error if there is one.
        self._failure: tuple[str, BaseException | None] | None = None
        self._returned: set[int] = set()
        # Per waiting rank: title of its call, and a function that returns the ranks for which it waits.
        self._waits: dict[int, tuple[str, Callable[[], list[int]]]] = {}
        # The last call of each rank, for messages.
        self._last = ["nothing yet"] * size
        main = _Channel("main", tuple(range(size)))
        self._groups = [ThreadGroup(self, main, rank, Traffic(rank, size)) for rank in range(size)]

    def group(self, rank: int) -> ThreadGroup:
        """Return the group object of that rank."""
        return self._groups[rank]

    def leave(self, rank: int) -> None:
        """Record that a rank has returned and makes no more calls; ranks that wait for it raise at once."""
        with self._changed:
            self._returned.add(rank)
            self._changed.notify_all()

    # -- for the groups, under the lock ------------------------------------------------------------------------

    def _fail(self, text: str, error: BaseException | None = None) -> None:
        if self._failure is None:
            self._failure = (text, error)
        self._changed.notify_all()

    def _raise_if_failed(self, where: str) -> None:
        if self._failure is not None:
            text, cause = self._failure
            raise CommsError(f"{where}: {text}") from cause

    def _waits_for(self, rank: int) -> list[int]:
        return self._waits[rank][1]() if rank in self._waits else []

    def _wait(
        self, rank: int, title: str, where: str, done: Callable[[], bool], missing: Callable[[], list[int]]
    ) -> None:
        """Return when `done()`.

        Raise if the world has failed, if a missing rank has left or waits for this rank, or at the time-out.
        """
        deadline = time.monotonic() + self.timeout_s
        with self._changed:
            self._waits[rank] = title, missing
            try:
                self._wait_locked(rank, where, done, missing, deadline)
            finally:
                del self._waits[rank]

    def _wait_locked(
        self,
        own: int,
        where: str,
        done: Callable[[], bool],
        missing: Callable[[], list[int]],
        deadline: float,
    ) -> None:
        while not done():
            self._raise_if_failed(where)
            ranks = missing()
            gone = [rank for rank in ranks if rank in self._returned]
            if gone:
                self._fail(
                    f"rank {gone[0]} has returned without this call; its last was {self._last[gone[0]]}. Every "
                    f"rank makes the same calls in the same order."
                )
                continue
            cycle = cycle_through(own, self._waits_for)
            if cycle:
                self._fail(cycle_text(cycle, {rank: self._waits[rank][0] for rank in cycle}))
                continue
            rest = deadline - time.monotonic()
            if rest <= 0:
                late = "; ".join(f"rank {rank} was last in {self._last[rank]}" for rank in ranks[:8])
                self._fail(
                    f"{len(ranks)} of {self.size} ranks did not come within {self.timeout_s:g} s: {late}. Every "
                    f"rank makes the same calls in the same order; check those ranks."
                )
                continue
            self._changed.wait(rest)


@final
class ThreadGroup(Group):
    """The group of one virtual rank, created by `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, channel: _Channel, rank: int, traffic: Traffic) -> None:
        super().__init__(rank, len(channel.ranks), traffic)
        self._world = world
        self._channel = channel
        self._calls = 0

    def partition(self, name: str, parts: Sequence[Sequence[int]]) -> ThreadGroup:
        part, place = self._part_of_this_rank(name, parts)
        share = (name, tuple(map(tuple, parts)))
        channels = self._call("partition", name, share, _open_channels, None).result()
        assert isinstance(channels, list)
        return ThreadGroup(self._world, channels[part], place, self.traffic.part(parts[part]))

    def abort(self, error: BaseException) -> None:
        world, rank = self._world, self._channel.ranks[self.rank]
        with world._changed:
            world._fail(f"rank {rank} failed with {type(error).__name__}: {error}", error)

    def close(self) -> None:
        """Do nothing: a channel of threads holds no resources."""

    def _all_to_all(
        self, name: str, output: Tensor | None, input: Tensor, output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> _CallHandle:  # fmt: skip
        if output is None:
            output = reused_empty(sum(output_splits), input.dtype, input.device)
        share = (output, input, tuple(output_splits), tuple(input_splits))
        return self._call("all_to_all", name, share, _move_parts, output)

    def _all_reduce_(self, name: str, tensor: Tensor) -> _CallHandle:
        return self._call("all_reduce", name, tensor, _sum_in_place, tensor)

    def _exchange(self, name: str, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> _ExchangeHandle:
        world, channel = self._world, self._channel
        where = self._describe(f"exchange '{name}'")
        messages = []
        with world._changed:
            world._raise_if_failed(where)
            world._last[channel.ranks[self.rank]] = f"exchange '{name}'"
            for peer, tensor in sends.items():
                messages.append(channel.post(world, name, self.rank, peer, "sends", tensor))
            for peer, tensor in receives.items():
                messages.append(channel.post(world, name, peer, self.rank, "wants", tensor))
            world._raise_if_failed(where)
        return _ExchangeHandle(world, f"exchange '{name}'", where, messages, channel.ranks, channel.ranks[self.rank])

    def _call(self, kind: str, name: str, share: object, finish: Finish, output: Tensor | None) -> _CallHandle:
        """Add this rank's share to its next call; the last rank to arrive finishes the call."""
        world, channel = self._world, self._channel
        title = f"{kind} '{name}'"
        with world._changed:
            number, self._calls = self._calls, self._calls + 1
            where = self._describe(title)
            world._raise_if_failed(where)
            world._last[channel.ranks[self.rank]] = f"{title} (call {number} of channel '{channel.name}')"
            call = channel.calls.setdefault(number, _Call(title, self.rank, len(channel.ranks)))
            if call.title != title:
                ours, theirs = channel.ranks[self.rank], channel.ranks[call.first]
                world._fail(
                    f"call {number} of channel '{channel.name}' differs: rank {theirs} is in {call.title}, rank {ours} "
                    f"in {title}. Every rank makes the same calls in the same order."
                )
                world._raise_if_failed(where)
            call.shares[self.rank] = share
            call.ready.append(_recorded(output))
            call.arrived += 1
            if call.arrived == len(channel.ranks):
                del channel.calls[number]
                for event in call.ready:
                    _wait_for_event(event)
                refusal, call.result = finish(channel, call.shares)
                call.moved = _recorded(output)
                if refusal:
                    world._fail(f"{title}: {refusal}")
                    world._raise_if_failed(where)
                call.done = True
                world._changed.notify_all()
        return _CallHandle(world, title, where, call, channel.ranks, channel.ranks[self.rank], output)

    def begin(self, operation: str) -> None:
        self._call("operation", operation, None, _finish_begin, None).result()

    def _describe(self, title: str) -> str:
        return f"{title} on rank {self._channel.ranks[self.rank]}"


_ABSENT = object()
"""Placeholder for the share of a rank that has not arrived yet."""


class _Call:
    """One call in progress: the shares of the ranks that have arrived."""

    def __init__(self, title: str, first: int, size: int) -> None:
        self.title = title
        self.first = first
        self.shares: list[object] = [_ABSENT] * size
        # Events of GPU tensors: one on each rank's stream when it called, and one on the last rank's after the copies.
        self.ready: list[torch.cuda.Event | None] = []
        self.moved: torch.cuda.Event | None = None
        self.arrived = 0
        self.done = False
        self.result: object = None


@dataclass
class _Post:
    """One message whose sender, receiver or both have arrived."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    ready: torch.cuda.Event | None = None
    moved: torch.cuda.Event | None = None
    done: bool = False


class _Channel:
    """Ranks whose calls are matched; `ranks` are their numbers in the world."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.calls: dict[int, _Call] = {}
        # Messages that wait for their other side, oldest first, by (name, source, target).
        self.posts: dict[tuple[str, int, int], list[_Post]] = {}

    def post(
        self, world: ThreadWorld, name: str, source: int, target: int, verb: str, tensor: Tensor
    ) -> tuple[int, _Post]:
        """Post one side of a message; the second side to arrive copies it. Return the peer and the message."""
        peer = target if verb == "sends" else source
        queue = self.posts.setdefault((name, source, target), [])
        waiting = next((post for post in queue if verb not in post.tensors), None)
        if waiting is None:
            waiting = _Post()
            waiting.ready = _recorded(tensor)
            queue.append(waiting)
        waiting.tensors[verb] = tensor
        if len(waiting.tensors) == 2:
            queue.remove(waiting)
            sent, wanted = waiting.tensors["sends"], waiting.tensors["wants"]
            if sent.numel() != wanted.numel() or sent.dtype != wanted.dtype:
                world._fail(
                    f"exchange '{name}': rank {self.ranks[source]} sends {sent.numel()} {_short(sent.dtype)} to rank "
                    f"{self.ranks[target]}, which expects {wanted.numel()} {_short(wanted.dtype)}."
                )
                return peer, waiting
            _wait_for_event(waiting.ready)
            with torch.no_grad():
                wanted.copy_(sent)
            waiting.moved = _recorded(tensor)
            waiting.done = True
            world._changed.notify_all()
        return peer, waiting


# Function by which the last rank to arrive processes all shares; returns a reason to fail ("" for none) and the result.
Finish = Callable[[_Channel, list[object]], tuple[str, object]]


@final
@dataclass
class _CallHandle:
    """The handle of a call. `ranks`: of the channel; `rank`: this one."""

    world: ThreadWorld
    title: str
    where: str
    call: _Call
    ranks: tuple[int, ...]
    rank: int
    output: Tensor | None

    def result(self) -> object:
        call = self.call
        if not call.done:
            self.world._wait(self.rank, self.title, self.where, lambda: call.done, self._missing)
        return call.result

    def wait(self) -> Tensor:
        self.result()
        _wait_for_event(self.call.moved)
        assert self.output is not None, "only calls with an output tensor are handed out"
        return self.output

    def is_done(self) -> bool:
        return self.call.done

    def _missing(self) -> list[int]:
        return [rank for rank, share in zip(self.ranks, self.call.shares, strict=True) if share is _ABSENT]


@final
@dataclass
class _ExchangeHandle:
    """The pending messages of one exchange. `ranks`: of the channel; `rank`: this one."""

    world: ThreadWorld
    title: str
    where: str
    messages: list[tuple[int, _Post]]
    ranks: tuple[int, ...]
    rank: int

    def _done(self) -> bool:
        return all(post.done for _, post in self.messages)

    def wait(self) -> None:
        if not self._done():
            self.world._wait(self.rank, self.title, self.where, self._done, self._missing)
        for _, post in self.messages:
            _wait_for_event(post.moved)

    def _missing(self) -> list[int]:
        return sorted({self.ranks[peer] for peer, post in self.messages if not post.done})


def _recorded(tensor: Tensor | None) -> torch.cuda.Event | None:
    """Record an event on the current stream of the tensor's GPU and return it; None for CPU tensors."""
    return (
        torch.cuda.current_stream(tensor.device).record_event()
        if tensor is not None and is_gpu(tensor.device)
        else None
    )


def _wait_for_event(event: torch.cuda.Event | None) -> None:
    """Make the current stream wait for the event."""
    if event is not None:
        event.wait()


def _finish_begin(channel: _Channel, shares: list[object]) -> tuple[str, object]:
    """Finish `begin`: all ranks have arrived."""
    return "", None


def _move_parts(channel: _Channel, shares: list[object]) -> tuple[str, object]:
    """Finish `all_to_all`: output part p of rank r is input part r of rank p."""
    sides: list[tuple[Tensor, Tensor, tuple[int, ...], tuple[int, ...]]] = shares  # type: ignore[assignment]
    for source, (_, sent, _, input_splits) in enumerate(sides):
        for target, (wanted, _, output_splits, _) in enumerate(sides):
            if input_splits[target] != output_splits[source] or sent.dtype != wanted.dtype:
                return (
                    f"rank {channel.ranks[source]} sends {input_splits[target]} {_short(sent.dtype)} to rank "
                    f"{channel.ranks[target]}, which expects {output_splits[source]} {_short(wanted.dtype)}.",
                    None,
                )
    with torch.no_grad():
        inputs = [sent.split(list(input_splits)) for _, sent, _, input_splits in sides]
        for target, (output, _, output_splits, _) in enumerate(sides):
            for source, part in enumerate(output.split(list(output_splits))):
                if output_splits[source]:
                    part.copy_(inputs[source][target])
    return "", None


def _sum_in_place(channel: _Channel, shares: list[object]) -> tuple[str, object]:
    """Finish `all_reduce`: write the sum, taken in the order of the ranks, to every rank's tensor."""
    tensors: list[Tensor] = shares  # type: ignore[assignment]
    first = tensors[0]
    for rank, tensor in zip(channel.ranks, tensors, strict=True):
        if tensor.numel() != first.numel() or tensor.dtype != first.dtype:
            return (
                f"rank {channel.ranks[0]} has {first.numel()} {_short(first.dtype)}, rank {rank} has "
                f"{tensor.numel()} {_short(tensor.dtype)}; expected tensors of one size and dtype.",
                None,
            )
    with torch.no_grad():
        total = first.reshape(-1).clone()
        for tensor in tensors[1:]:
            total += tensor.reshape(-1)
        for tensor in tensors:
            tensor.view(-1).copy_(total)
    return "", None


def _open_channels(channel: _Channel, shares: list[object]) -> tuple[str, object]:
    """Finish `partition`: open one channel per part."""
    for rank, share in zip(channel.ranks, shares, strict=True):
        if share != shares[0]:
            return (
                f"rank {channel.ranks[0]} passes {shares[0]}, rank {rank} {share}; pass the same parts.",
                None,
            )
    request: tuple[str, tuple[tuple[int, ...], ...]] = shares[0]  # type: ignore[assignment]
    name, parts = request
    ranks = [tuple(channel.ranks[rank] for rank in part) for part in parts]
    return "", [_Channel(f"{channel.name}/{name}", members) for members in ranks]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
