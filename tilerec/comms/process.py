"""`ProcessGroupComms`: ranks that are processes, over `torch.distributed` (gloo on CPU and CUDA tensors, NCCL).

Tensors of any dtype can be sent: dtypes that the backends do not support are sent as bytes. Parts that stay on their
rank are copied in memory.

When a rank fails
    dies                    its connections close; gloo raises on the other ranks at once
    calls `abort(error)`    it writes a failure message ("last words") to the group's store. The other ranks check the
                            store whenever a collective takes longer than `_POLL_INTERVAL`, and when a call fails. Waits
                            of `exchange` (gloo's messages) cannot check it: they fail when that rank's process ends
    makes another call      it waits in another call than its peers: `deadlock.py` detects a cycle of waiting ranks
                            within two polls of the last rank's wait (not waits in an `exchange`)
    is late                 the process group's own time-out (`init_process_group(timeout=…)`) ends the wait. If ranks
                            report their stages (`reporting`), all others name it, with its last stage
Under NCCL `wait` orders streams and does not block the host: a failure ends the process through NCCL's watchdog.
"""

from __future__ import annotations

import re
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from tilerec.comms.deadlock import Call, DeadlockDetector
from tilerec.comms.exit_wait import MessagesInFlight
from tilerec.comms.group import Group
from tilerec.comms.shared_parts import SharedHandle, SharedMessage, SharedParts
from tilerec.comms.stage_reports import StageReports
from tilerec.comms.traffic import Traffic
from tilerec.errors import CommsError, ConfigError
from tilerec.ops.backends import reused_empty
from tilerec.ops.runtime.gpu import is_gpu
from tilerec.torch_private import timeout_of

# Interval at which a waiting call checks whether a peer has aborted.
_POLL_INTERVAL = timedelta(seconds=0.25)
# Dtypes that both gloo and NCCL support; others are sent as bytes.
_NATIVE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8
}  # fmt: skip
_ASYNC = dist.AllToAllOptions() if dist.is_available() else None
_DEFAULT_TIMEOUT = timedelta(minutes=30)
# Parts of torch's messages for a lost or late peer.
_PEERS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL error")
# One of each per process group, shared by all groups over it and the channels opened from them.
_WATCHES: weakref.WeakKeyDictionary[dist.ProcessGroup, DeadlockDetector] = weakref.WeakKeyDictionary()
_IN_FLIGHT = MessagesInFlight()
_SHARED: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedParts] = weakref.WeakKeyDictionary()


def is_peer_failure(text: str) -> bool:
    """Return True if the text of an error of torch is that of a lost or late peer."""
    return any(words in text for words in _PEERS)


@final
class ProcessGroupComms(Group):
    """The ranks of a `torch.distributed.ProcessGroup`.

    Args:
        process_group: None for the default group. `torch.distributed.init_process_group` must have been called.

    Ranks are numbered as in the process group, not by their global numbers.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "ProcessGroupComms: torch.distributed has no process group yet; call "
                "torch.distributed.init_process_group() first (torchrun sets the variables that it reads)."
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
            watch = _WATCHES[whole] = DeadlockDetector(whole.get_group_store(), rank, size)
        shared = _SHARED.get(whole)
        if shared is None:
            shared = _SHARED[whole] = SharedParts(rank, size)
        self._open(whole, rank, tuple(range(size)), Traffic(rank, size), watch, shared, owned=False)

    def _open(
        self,
        process_group: dist.ProcessGroup,
        rank: int,
        members: tuple[int, ...],
        traffic: Traffic,
        watch: DeadlockDetector,
        shared: SharedParts,
        *,
        owned: bool,
    ) -> None:
        # "cpu:gloo,cuda:nccl": backend per device type.
        self._config = dist.get_backend_config(process_group)
        self._backends = dict(entry.split(":") for entry in self._config.split(","))
        on_cpu = "cpu" in self._backends
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        super().__init__(rank, len(members), traffic, device)
        self._process_group = process_group
        # Shared by all channels: an aborted peer is missing on each of them.
        self._watch = watch
        self._shared = shared
        # Numbers in the group from which all channels were opened.
        self._members = members
        self._name = process_group.group_name
        self._owned = owned
        self._global = dist.get_process_group_ranks(process_group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group that sends the messages."""
        return self._process_group

    def partition(self, name: str, parts: Sequence[Sequence[int]]) -> ProcessGroupComms:
        """Run `Group.partition`; all ranks of the default process group must call it at the same time.

        This is torch's rule for `new_group`: names of groups in the rendezvous store are unique only if every rank
        counts every group.
        """
        mine, place = self._part_of_this_rank(name, parts)
        title = f"partition '{name}'"
        self._raise_if_failed(title)
        if self._backends.get("cpu") == "gloo":
            self._shared.agree(self, self._members)
        traffic = self.traffic.part(parts[mine])
        try:
            process_group = self._new_group(name, parts)
        except RuntimeError as error:
            raise self._error(title, error) from error
        channel = object.__new__(ProcessGroupComms)
        members = tuple(self._members[rank] for rank in parts[mine])
        channel._open(process_group, place, members, traffic, self._watch, self._shared, owned=True)
        return channel

    def _new_group(self, name: str, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Open the new process groups, in one order on all ranks of the default group, and return this rank's."""
        members = {tuple(self._global[rank] for rank in part) for part in parts}
        if self.size < dist.get_world_size():
            all_members: list[set[tuple[int, ...]]] = [set()] * dist.get_world_size()
            dist.all_gather_object(all_members, members)
            members = set().union(*all_members)
        own: dist.ProcessGroup | None = None
        # A group made with a map of one backend has no default backend, and torch warns when it is closed.
        one = dist.get_backend(self._process_group)
        backend = one if {one} == set(self._backends.values()) else self._config
        for ranks in sorted(members):
            process_group = dist.new_group(
                ranks, timeout=self._timeout(), backend=backend, group_desc=f"tilerec:{name}"
            )
            if dist.get_rank() in ranks:
                own = process_group
        assert own is not None, "every rank is in a part"
        return own

    def abort(self, error: BaseException) -> None:
        self._watch.leave_words(f"rank {dist.get_rank()} failed with {type(error).__name__}: {error}")
        if "nccl" in self._backends.values():
            self._process_group.abort()

    def reporting(self, where: Callable[[], str]) -> StageReports:
        """Return a context that publishes this rank's stage, for the errors of ranks that wait for it in vain.

        Args:
            where: returns the stage as a text; called every few seconds by another thread.
        """
        return StageReports(self._watch, where, self.size, (self._timeout() or _DEFAULT_TIMEOUT).total_seconds())

    def failure(self, title: str, error: RuntimeError) -> RuntimeError:
        """Return an error of a collective that torch has called as a `CommsError`; other errors as they are."""
        lost = not isinstance(error, CommsError) and is_peer_failure(str(error))
        return self._error(title, error) if lost else error

    def close(self) -> None:
        if self._owned:
            self._owned = False
            dist.destroy_process_group(self._process_group)

    # -- calls -------------------------------------------------------------------------------------------------

    def begin(self, operation: str) -> None:
        # Waits through the store: messages could pair with those of ranks in another call.
        self._raise_if_failed(operation)
        if self.size == 1:
            return
        watch, channel = self._watch, f"{self._name}, operations"
        call = watch.begin(operation, channel, self._members)
        key = f"tilerec/operations/{self._name}/{call.number}"
        mine = f"{self.rank} {operation}"
        deadline = time.monotonic() + (self._timeout() or _DEFAULT_TIMEOUT).total_seconds()
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
        # Poll instead of `store.wait`: PyTorch prints two warnings whenever its time-out ends.
        poll_seconds = _POLL_INTERVAL.total_seconds()
        pause = poll_seconds / 256
        while not self._stored(f"{key}/all", operation):
            if pause >= poll_seconds:
                self._look(call)
                if time.monotonic() > deadline:
                    timed_out = RuntimeError("timed out")
                    raise self._error(operation, timed_out, call) from timed_out
            time.sleep(pause)
            pause = min(2 * pause, poll_seconds)

    def _stored(self, key: str, title: str) -> bool:
        """Return True if a rank has written the key to the store."""
        try:
            return bool(self._watch.store.check([key]))
        except RuntimeError as error:  # the store died with the rank that hosted it
            raise self._error(title, error) from error

    def send_buffer(self, size: int) -> Tensor | None:
        return self._shared.buffer(size)

    def _all_to_all(
        self, name: str, output: Tensor | None, input: Tensor, output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> _CollectiveHandle | SharedHandle:  # fmt: skip
        title = f"all_to_all '{name}'"
        self._raise_if_failed(title)
        call = None if self.size == 1 else self._watch.begin(title, self._name, self._members)
        message = None if call is None else self._shared_message(call, input, output_splits, input_splits)
        if message is not None:
            own = message.output, message.input
            work, sent = self._post(title, *own, message.output_splits, message.input_splits)
            handle = self._noted(_CollectiveHandle(self, title, [work], message.output, own, call), sent)
            return SharedHandle(self._shared, handle, message, output, input.dtype)
        if output is None:
            output = reused_empty(sum(output_splits), input.dtype, input.device)
        if self.size == 1:
            output.detach().copy_(input.detach())
            return _CollectiveHandle(self, title, [], output, (), None)
        wires = output, input
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
        work, sent = self._post(title, *wires, output_splits, input_splits)
        return self._noted(_CollectiveHandle(self, title, [work], output, (input, *wires), call, back), sent)

    def _post(
        self, title: str, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> tuple[dist.Work, list[Tensor]]:  # fmt: skip
        """Send a message through aliases of its tensors; return both."""
        into, out = output.detach(), input.detach()
        try:
            # Calls the process group's method: torch.distributed's wrapper costs more than a small exchange.
            work = self._process_group.alltoall_base(into, out, list(output_splits), list(input_splits), _ASYNC)
        except RuntimeError as error:
            raise self._error(title, error) from error
        return work, [into, out]

    def _shared_message(
        self, call: Call, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> SharedMessage | None:
        """Return the message of an `all_to_all` that leaves large parts in memory; None if it has no such part."""
        if input.device.type != "cpu" or self._backends.get("cpu") != "gloo":
            return None
        item = input.element_size()
        sends, receives = [n * item for n in input_splits], [n * item for n in output_splits]
        return self._shared.pack(call.title, _bytes(input), sends, receives, self._members)

    def _all_reduce_(self, name: str, tensor: Tensor) -> _CollectiveHandle:
        title = f"all_reduce '{name}'"
        self._raise_if_failed(title)
        if self.size == 1:
            return _CollectiveHandle(self, title, [], tensor, (), None)
        call = self._watch.begin(title, self._name, self._members)
        wire, back = tensor, None
        if self._carrier(tensor) != tensor.device:
            wire = wire.to(self._carrier(tensor))
            back = tensor, wire
        try:
            sent = [wire.detach()]
            work = dist.all_reduce(sent[0], group=self._process_group, async_op=True)
        except RuntimeError as error:
            raise self._error(title, error) from error
        return self._noted(_CollectiveHandle(self, title, [work], tensor, (wire,), call, back), sent)

    def _noted(self, handle: _CollectiveHandle, sent: list[Tensor]) -> _CollectiveHandle:
        """Return the handle of a message sent through the aliases `sent`."""
        if self._backends.get(sent[0].device.type) == "gloo":
            _IN_FLIGHT.add(handle, sent)
        return handle

    def _carrier(self, tensor: Tensor) -> torch.device:
        """Return the device from which a tensor can be sent; NCCL cannot send host rows of cached tables."""
        return tensor.device if tensor.device.type in self._backends else self.device

    def _exchange(self, name: str, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> _ExchangeHandle:
        title = f"exchange '{name}'"
        self._raise_if_failed(title)
        tag = zlib.crc32(name.encode()) & 0x7FFFFFFF
        staged: list[tuple[Tensor, Tensor]] = []
        operations = []
        alive = []
        for verb, tensors in ((dist.irecv, receives), (dist.isend, sends)):
            for peer, tensor in tensors.items():
                if peer == self.rank or tensor.numel() == 0:
                    continue
                wire, to = _bytes(tensor), self._carrier(tensor)
                if is_gpu(tensor.device) and self._backends.get("cuda") == "gloo":
                    to = torch.device("cpu")  # gloo stages GPU tensors for collectives, but not for messages
                if to != tensor.device:
                    wire = wire.to(to) if verb is dist.isend else torch.empty_like(wire, device=to)
                    if verb is dist.irecv:
                        staged.append((tensor, wire))
                alive.append(wire)
                operations.append(dist.P2POp(verb, wire, group=self._process_group, tag=tag, group_peer=peer))
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._error(title, error) from error
        if self.rank in sends:
            receives[self.rank].detach().copy_(sends[self.rank].detach())
        return _ExchangeHandle(self, title, works, staged, alive)

    # -- for the handles ---------------------------------------------------------------------------------------

    def _finish(self, title: str, work: dist.Work, device: torch.device, call: Call | None) -> None:
        """Wait for a work; with `call`, check periodically whether a peer has aborted or waits for this rank."""
        if self._backends.get(device.type) == "nccl":
            work.wait()
            return
        try:
            while call is not None:
                try:
                    work.wait(_POLL_INTERVAL)
                    return
                except RuntimeError:
                    if work.is_completed():
                        break
                    self._look(call)
            # Completed in the meantime, or failed: this returns at once or raises the cause.
            work.wait()
        except CommsError:
            raise
        except RuntimeError as error:
            raise self._error(title, error, call) from error

    def _look(self, call: Call) -> None:
        """Raise if a peer has aborted, and raise on all ranks if this wait cannot end."""
        self._raise_if_failed(call.title, look=True)
        words = self._watch.look(call)
        if words:
            self._watch.leave_words(words)
            self._raise_if_failed(call.title)

    def _raise_if_failed(self, title: str, *, look: bool = False) -> None:
        words = self._watch.last_words(look=look)
        if words is not None:
            raise CommsError(f"{title} on rank {self.rank} of {self.size}: {words}")

    def _error(self, title: str, error: RuntimeError, call: Call | None = None) -> CommsError:
        """Return torch's error as a `CommsError` that names the call and the ranks to check.

        Args:
            call: whose wait has failed; None if its ranks are not known.
        """
        where = f"{title} on rank {self.rank} of {self.size}"
        words = self._watch.last_words(look=True)
        if words is not None:
            return CommsError(f"{where}: {words}")
        peers = ", ".join(str(rank) for rank in self._global[:16] if rank != self._global[self.rank])
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            missing = self._watch.missing(call)
            if missing:
                # The end of this rank closes its connections; peers then read this text in place of that error.
                missing = f"no end within the time-out. {missing[0].upper()}{missing[1:]}. See its log."
                self._watch.leave_words(f"{title}: {missing}")
                return CommsError(f"{where}: {missing}")
            return CommsError(
                f"{where}: no end within the process group's time-out ({error}). A rank is late, stopped, or makes "
                f"other calls: every rank makes the same calls in the same order. Check global ranks {peers}; if one "
                f"is only slow, pass a longer timeout= to init_process_group."
            )
        # Drop gloo's advice and the path of its source file; the text below is more precise.
        cause = re.sub(r"^\[\S+\] ", "", str(error)).partition(" This is typically")[0].rstrip(". ")
        return CommsError(
            f"{where}: {cause}. A peer has most likely died; look for the first error in the logs of global ranks "
            f"{peers}."
        )

    def _timeout(self) -> timedelta | None:
        """Return the process group's time-out, for the channels opened from it."""
        return timeout_of(self._process_group, self.device)


@final
@dataclass
class _CollectiveHandle:
    """The handle of a collective.

    Args:
        alive: buffers that the call reads until it ends.
        back: the output, and its staging buffer on another device.
    """

    group: ProcessGroupComms
    title: str
    works: Sequence[dist.Work]
    output: Tensor
    alive: tuple[Tensor, ...]
    call: Call | None
    back: tuple[Tensor, Tensor] | None = None

    def wait(self) -> Tensor:
        device = self.output.device if self.back is None else self.back[1].device
        for work in self.works:
            self.group._finish(self.title, work, device, self.call)
        if self.back is not None:
            self.back[0].detach().copy_(self.back[1])
        self.release()
        return self.output

    def release(self) -> None:
        """Drop the message."""
        self.works, self.alive, self.back = (), (), None

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)


@final
@dataclass
class _ExchangeHandle:
    """The handle of an exchange.

    Args:
        staged: pairs of destination tensor and staging buffer.
        alive: buffers that the call reads or writes until it ends.
    """

    group: ProcessGroupComms
    title: str
    works: Sequence[dist.Work]
    staged: list[tuple[Tensor, Tensor]]
    alive: list[Tensor]

    def wait(self) -> None:
        for work in self.works:
            # No polling here: gloo closes a connection if the wait for its message is interrupted.
            self.group._finish(self.title, work, self.alive[0].device, None)
        for tensor, wire in self.staged:
            _bytes(tensor).copy_(wire)
        self.works, self.staged, self.alive = (), [], []


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)
