"""`ProcessGroupComms`: ranks that are processes, over `torch.distributed` (gloo on CPU and CUDA tensors, NCCL).

Every tensor of an all-to-all or exchange travels as bytes, so any dtype does; what stays on its rank is copied in
memory.

When a rank fails
    dies                    its connections close; gloo raises on the others at once
    calls `abort(error)`    leaves its last words in the group's store; the others look there whenever a collective
                            takes longer than `_GLANCE`, and when a call fails (gloo's messages, those of `exchange`,
                            cannot be looked up from: they fail when that rank's process ends)
    calls something else    waits in another call than its peers: `deadlock.py` finds ranks that wait for each other
                            within two glances of the last one's (not those that wait in an `exchange`)
    is late                 the process group's own time-out (`init_process_group(timeout=…)`) ends the wait
Under NCCL `wait` orders streams and does not stop the host: a failure ends the process through NCCL's watchdog.
"""

from __future__ import annotations

import re
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from tilerec.comms.deadlock import Call, Watch
from tilerec.comms.group import Group
from tilerec.comms.traffic import Traffic
from tilerec.errors import CommsError, ConfigError
from tilerec.torch_private import timeout_of

# How long a wait goes on before it looks whether a peer has given up.
_GLANCE = timedelta(seconds=0.25)
# What gloo and NCCL both carry; other dtypes travel as bytes.
_NATIVE = frozenset(
    (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    )
)
_ASYNC = dist.AllToAllOptions() if dist.is_available() else None
_HALF_AN_HOUR = timedelta(minutes=30)
# One for all groups over a process group and for the channels opened from them.
_WATCHES: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()


@final
class ProcessGroupComms(Group):
    """The ranks of a `torch.distributed.ProcessGroup`.

    Args:
        process_group: None for the default group. `torch.distributed.init_process_group` must have been called.

    The group's rank 0 is rank 0 of the process group, whatever its global number.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "ProcessGroupComms: torch.distributed has no process group yet; call "
                "torch.distributed.init_process_group() first (torchrun sets the variables it reads)."
            )
        whole = dist.group.WORLD if process_group is None else process_group
        rank = dist.get_rank(whole)
        if whole is None or rank < 0:
            raise ConfigError(
                f"ProcessGroupComms: rank {dist.get_rank()} is no member of the process group; wrap a group on its "
                f"members only."
            )
        size = dist.get_world_size(whole)
        watch = _WATCHES.get(whole)
        if watch is None:
            watch = _WATCHES[whole] = Watch(whole.get_group_store(), rank, size)
        self._open(whole, rank, tuple(range(size)), Traffic(rank, size), watch, owned=False)

    def _open(
        self,
        process_group: dist.ProcessGroup,
        rank: int,
        members: tuple[int, ...],
        traffic: Traffic,
        watch: Watch,
        *,
        owned: bool,
    ) -> None:
        # "cpu:gloo,cuda:nccl": which backend carries the tensors of which device.
        self._config = dist.get_backend_config(process_group)
        self._backends = dict(entry.split(":") for entry in self._config.split(","))
        on_cpu = "cpu" in self._backends
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        super().__init__(rank, len(members), traffic, device)
        self._process_group = process_group
        # Shared by all channels: a peer that has given up is missed on each of them.
        self._watch = watch
        # In the numbers of the group that all channels come from.
        self._members = members
        self._name = process_group.group_name
        self._owned = owned
        self._global = dist.get_process_group_ranks(process_group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """What the ranks talk over."""
        return self._process_group

    def partition(self, name: str, parts: Sequence[Sequence[int]]) -> ProcessGroupComms:
        """As `Group.partition`; besides, all ranks of the default process group call it at the same time.

        That is torch's own rule for `new_group`: groups over some ranks have names (in the store where ranks meet) that
        are unique only if every rank counts every group.
        """
        mine, place = self._part_of_this_rank(name, parts)
        what = f"partition '{name}'"
        self._raise_if_failed(what)
        traffic = self.traffic.part(parts[mine])
        try:
            process_group = self._new_group(name, parts)
        except RuntimeError as error:
            raise self._error(what, error) from error
        channel = object.__new__(ProcessGroupComms)
        members = tuple(self._members[rank] for rank in parts[mine])
        channel._open(process_group, place, members, traffic, self._watch, owned=True)
        return channel

    def _new_group(self, name: str, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """This rank's of the new process groups; opened in one order on all ranks of the default group."""
        members = {tuple(self._global[rank] for rank in part) for part in parts}
        if self.size < dist.get_world_size():
            everyone: list[set[tuple[int, ...]]] = [set()] * dist.get_world_size()
            dist.all_gather_object(everyone, members)
            members = set().union(*everyone)
        own: dist.ProcessGroup | None = None
        for ranks in sorted(members):
            process_group = dist.new_group(
                ranks, timeout=self._timeout(), backend=self._config, group_desc=f"tilerec:{name}"
            )
            if dist.get_rank() in ranks:
                own = process_group
        assert own is not None, "every rank is in a part"
        return own

    def abort(self, error: BaseException) -> None:
        self._watch.leave_words(f"rank {dist.get_rank()} failed with {type(error).__name__}: {error}")
        if "nccl" in self._backends.values():
            self._process_group.abort()

    def close(self) -> None:
        if self._owned:
            self._owned = False
            dist.destroy_process_group(self._process_group)

    # -- calls -------------------------------------------------------------------------------------------------

    def _begin(self, operation: str) -> None:
        """Over the store: messages would pair with those of ranks that make another call."""
        self._raise_if_failed(operation)
        if self.size == 1:
            return
        watch, channel = self._watch, f"{self._name}, operations"
        call = watch.begin(operation, channel, self._members)
        key = f"tilerec/operations/{self._name}/{call.number}"
        mine = f"{self.rank} {operation}"
        deadline = time.monotonic() + (self._timeout() or _HALF_AN_HOUR).total_seconds()
        try:
            first = watch.store.compare_set(key, "", mine).decode()
            rank, _, other = first.partition(" ")
            if other != operation:
                words = (
                    f"rank {rank} is in {other} and rank {self.rank} in {operation}. Every rank makes the same calls "
                    "in the same order."
                )
                watch.leave_words(words)
                raise CommsError(f"{operation} on rank {self.rank} of {self.size}: {words}")
            if watch.store.add(f"{key}/came", 1) == self.size:
                watch.store.set(f"{key}/all", "")
        except RuntimeError as error:
            raise self._error(operation, error) from error
        # `store.wait` is no help: PyTorch prints two warnings each time that its time-out ends.
        glance = _GLANCE.total_seconds()
        pause = glance / 256
        while not self._stored(f"{key}/all", operation):
            if pause >= glance:
                self._look(call)
                if time.monotonic() > deadline:
                    timed_out = RuntimeError("timed out")
                    raise self._error(operation, timed_out) from timed_out
            time.sleep(pause)
            pause = min(2 * pause, glance)

    def _stored(self, key: str, what: str) -> bool:
        """Whether a rank has written the key to the store."""
        try:
            return bool(self._watch.store.check([key]))
        except RuntimeError as error:  # the store died with the rank that held it
            raise self._error(what, error) from error

    def _all_to_all(
        self,
        name: str,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> _Works:
        what = f"all_to_all '{name}'"
        self._raise_if_failed(what)
        if self.size == 1:
            output.detach().copy_(input.detach())
            return _Works(self, what, [], output, (), None)
        call = self._watch.begin(what, self._name, self._members)
        wires = _native(output), _native(input)
        if input.dtype not in _NATIVE:
            item = input.element_size()
            wires = _bytes(output), _bytes(input)
            output_splits = [split * item for split in output_splits]
            input_splits = [split * item for split in input_splits]
        back: tuple[Tensor, Tensor] | None = None
        if self._carrier(output) != output.device:
            to = self._carrier(output)
            back = wires[0], torch.empty_like(wires[0], device=to)
            wires = back[1], wires[1].to(to)
        try:
            # The process group's own method: torch.distributed's function around it costs more than a small exchange.
            work = self._process_group.alltoall_base(*wires, list(output_splits), list(input_splits), _ASYNC)
        except RuntimeError as error:
            raise self._error(what, error) from error
        return _Works(self, what, [work], output, (input, *wires), call, back)

    def _all_reduce_(self, name: str, tensor: Tensor) -> _Works:
        what = f"all_reduce '{name}'"
        self._raise_if_failed(what)
        if self.size == 1:
            return _Works(self, what, [], tensor, (), None)
        call = self._watch.begin(what, self._name, self._members)
        wire, back = _native(tensor), None
        if self._carrier(tensor) != tensor.device:
            wire = wire.to(self._carrier(tensor))
            back = _native(tensor), wire
        try:
            work = dist.all_reduce(wire, group=self._process_group, async_op=True)
        except RuntimeError as error:
            raise self._error(what, error) from error
        return _Works(self, what, [work], tensor, (wire,), call, back)

    def _carrier(self, tensor: Tensor) -> torch.device:
        """Where a tensor has to be to travel: rows of cached tables lie in host memory, which NCCL does not send."""
        return tensor.device if tensor.device.type in self._backends else self.device

    def _exchange(self, name: str, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> _Letters:
        what = f"exchange '{name}'"
        self._raise_if_failed(what)
        tag = zlib.crc32(name.encode()) & 0x7FFFFFFF
        staged: list[tuple[Tensor, Tensor]] = []
        operations = []
        alive = []
        for verb, tensors in ((dist.irecv, receives), (dist.isend, sends)):
            for peer, tensor in tensors.items():
                if peer == self.rank or tensor.numel() == 0:
                    continue
                wire, to = _bytes(tensor), self._carrier(tensor)
                if tensor.is_cuda and self._backends.get("cuda") == "gloo":
                    to = torch.device(
                        "cpu"
                    )  # gloo's collectives stage GPU tensors themselves, its messages do not
                if to != tensor.device:
                    wire = wire.to(to) if verb is dist.isend else torch.empty_like(wire, device=to)
                    if verb is dist.irecv:
                        staged.append((tensor, wire))
                alive.append(wire)
                operations.append(dist.P2POp(verb, wire, group=self._process_group, tag=tag, group_peer=peer))
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._error(what, error) from error
        if self.rank in sends:
            receives[self.rank].detach().copy_(sends[self.rank].detach())
        return _Letters(self, what, works, staged, alive)

    # -- for the handles ---------------------------------------------------------------------------------------

    def _finish(self, what: str, work: dist.Work, device: torch.device, call: Call | None) -> None:
        """Wait for a work; with `call`, look now and then whether a peer has given up, or waits for this rank."""
        if self._backends.get(device.type) == "nccl":
            work.wait()
            return
        try:
            while call is not None:
                try:
                    work.wait(_GLANCE)
                    return
                except RuntimeError:
                    if work.is_completed():
                        break
                    self._look(call)
            # Completed in the meantime, or failed: this returns at once or tells the cause.
            work.wait()
        except CommsError:
            raise
        except RuntimeError as error:
            raise self._error(what, error) from error

    def _look(self, call: Call) -> None:
        """Raise, on all ranks, where this one waits in vain."""
        self._raise_if_failed(call.title, look=True)
        words = self._watch.look(call)
        if words:
            self._watch.leave_words(words)
            self._raise_if_failed(call.title)

    def _raise_if_failed(self, what: str, *, look: bool = False) -> None:
        words = self._watch.last_words(look=look)
        if words is not None:
            raise CommsError(f"{what} on rank {self.rank} of {self.size}: {words}")

    def _error(self, what: str, error: RuntimeError) -> CommsError:
        """Torch's error in words that say which call it was and where to look."""
        where = f"{what} on rank {self.rank} of {self.size}"
        words = self._watch.last_words(look=True)
        if words is not None:
            return CommsError(f"{where}: {words}")
        peers = ", ".join(str(rank) for rank in self._global[:16] if rank != self._global[self.rank])
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            return CommsError(
                f"{where}: no end within the process group's time-out ({error}). A rank is late, stopped, or makes "
                f"other calls: every rank makes the same calls in the same order. Look what global ranks {peers} are "
                f"doing; if one is only slow, pass a longer timeout= to init_process_group."
            )
        # Gloo's own advice, and the path of its source file, say less than ours.
        cause = re.sub(r"^\[\S+\] ", "", str(error)).partition(" This is typically")[0].rstrip(". ")
        return CommsError(
            f"{where}: {cause}. A peer has most likely died; look for the first error in the logs of global ranks "
            f"{peers}."
        )

    def _timeout(self) -> timedelta | None:
        """The process group's own time-out, for the channels opened from it."""
        return timeout_of(self._process_group, self.device)


@final
class _Works:
    """The handle of a collective."""

    def __init__(
        self,
        group: ProcessGroupComms,
        what: str,
        works: Sequence[dist.Work],
        output: Tensor,
        alive: tuple[Tensor, ...],
        call: Call | None,
        back: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._group = group
        self._what = what
        self._works = works
        self._output = output
        # Read until the call ends.
        self._alive = alive
        self._call = call
        # The output's elements, and what they come in on another device.
        self._back = back

    def wait(self) -> Tensor:
        device = self._output.device if self._back is None else self._back[1].device
        for work in self._works:
            self._group._finish(self._what, work, device, self._call)
        if self._back is not None:
            self._back[0].detach().copy_(self._back[1])
        self._works, self._alive, self._back = (), (), None
        return self._output


@final
class _Letters:
    """The handle of an exchange."""

    def __init__(
        self,
        group: ProcessGroupComms,
        what: str,
        works: Sequence[dist.Work],
        staged: list[tuple[Tensor, Tensor]],
        alive: list[Tensor],
    ) -> None:
        self._group = group
        self._what = what
        self._works = works
        # Received in one memory, meant for another.
        self._staged = staged
        # Read or written until the call ends.
        self._alive = alive

    def wait(self) -> None:
        for work in self._works:
            # gloo ends a connection whose message is not awaited to its end: no glances here.
            self._group._finish(self._what, work, self._alive[0].device, None)
        for tensor, wire in self._staged:
            _bytes(tensor).copy_(wire)
        self._works, self._staged, self._alive = (), [], []


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)


def _native(tensor: Tensor) -> Tensor:
    """For the backend: autograd has no part in it."""
    return tensor.detach() if tensor.requires_grad else tensor
