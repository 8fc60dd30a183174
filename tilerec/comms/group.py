"""`Group`: the ranks that hold a model's tables, and their collectives.

Glossary
    rank        one of `size` peers, 0 <= rank < size; each holds its own `Group` object
    call        one collective; every rank of the group makes the same calls in the same order
    name        label of a call's payload ("ids", "rows") in traffic counts and errors; the same on every rank
    handle      a call that has begun; `.wait()` ends it
    channel     calls of one channel keep their order; `split` opens another, independent channel
    splits      elements for each rank: a 1-D tensor is part 0 | part 1 | … | part W-1, parts may be empty

    all_to_all:  output part p of rank r  =  input part r of rank p

Two implementations: `ProcessGroupComms` over `torch.distributed` (gloo, NCCL), and `ThreadGroup` for ranks that are
threads of one process. They are interchangeable.

Legend: W ranks.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from tilerec.comms.traffic import Traffic
from tilerec.errors import ConfigError


class Handle(Protocol):
    """A call with a result. It keeps the call's tensors alive."""

    def wait(self) -> Tensor:
        """Return the complete output (on a GPU: complete for the current stream). A second call returns it at once.

        Raises `CommsError` if a peer failed, died, made another call or was late.
        """

    def is_done(self) -> bool:
        """Return True if `wait` will not block: the call has ended, or failed."""


class Pending(Protocol):
    """A call without a result. It keeps the call's tensors alive."""

    def wait(self) -> None:
        """Return when the tensors may be read and written. Raises like `Handle.wait`."""


class _SwapHandle:
    """The handle of a `swap`."""

    def __init__(self, handle: Handle, into: list[Tensor], sizes: list[int]) -> None:
        self._handle, self._into, self._sizes = handle, into, sizes

    def wait(self) -> None:
        received = self._handle.wait()
        for tensor, part in zip(self._into, received.split(self._sizes) if self._into else [], strict=True):
            tensor.copy_(part)
        self._into = []


class Group(ABC):
    """The ranks that hold a model's tables, seen from one of them.

    rank: this rank's number in the group.
    size: the number of ranks, W.
    traffic: the bytes that this rank sent, counted by name and peer.
    device: device of the group's own small messages: the CPU, or the rank's GPU under NCCL.
    """

    def __init__(self, rank: int, size: int, traffic: Traffic, device: torch.device | None = None) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"Group: got rank {rank}; expected a number in [0, {size}), the group's ranks.")
        self.rank = rank
        self.size = size
        self.traffic = traffic
        self.device = torch.device("cpu") if device is None else device

    @final
    def all_to_all(
        self, name: str, output: Tensor | None, input: Tensor, output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:  # fmt: skip
        """Send part p of `input` to every rank p; receive part p of `output` from every rank p.

        Args:
            output, input: 1-D, contiguous, one dtype (any) and device. They must not overlap, and must not be read or
                written before `wait`. A tensor of `send_buffer` must not be written after the call, either. Without
                `output`, the group chooses its memory, which may be that of a peer: `wait` then returns a tensor that
                is only to be read.
            output_splits, input_splits: elements from and to each rank, [W]; they sum to the tensors' lengths. Rank p's
                `input_splits[r]` must equal rank r's `output_splits[p]`: sizes are not sent.

        W = 2; rank 0 sends [7] to itself and [8, 9] to rank 1, rank 1 sends [5] to rank 0 and nothing to itself: rank 0
        ends with [7, 5], rank 1 with [8, 9].
        """
        if output is not None:
            self._check_part("output", name, output, output_splits)
        self._check_part("input", name, input, input_splits)
        if output is not None and (output.dtype != input.dtype or output.device != input.device):
            raise ConfigError(
                f"all_to_all '{name}' on rank {self.rank}: input is {input.dtype} on {input.device}, output "
                f"{output.dtype} on {output.device}; expected one dtype and device."
            )
        self.traffic.record(name, input_splits, input.element_size())
        return self._all_to_all(name, output, input, output_splits, input_splits)

    def send_buffer(self, size: int) -> Tensor | None:
        """Return `size` uninitialized bytes on the CPU for the input of one `all_to_all`, which then copies nothing.

        None: the group has no such memory.
        """
        return None

    @final
    def exchange(self, name: str, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> Pending:
        """Send each tensor of `sends` to its rank and fill each tensor of `receives` from its rank, point to point.

        Tensors are 1-D and contiguous, of any dtype; both sides pass equal sizes. Ranks that appear in no mapping do
        not call. A peer's tensor may be empty, and a message to the rank itself is copied. Messages between two ranks
        under one name arrive in the order in which they were sent.
        """
        for verb, tensors in (("receives", receives), ("sends", sends)):
            for peer, tensor in tensors.items():
                if not 0 <= peer < self.size:
                    raise ConfigError(
                        f"exchange '{name}' on rank {self.rank}: {verb} names rank {peer}; the group has ranks 0 to "
                        f"{self.size - 1}."
                    )
                _check_flat(f"exchange '{name}' on rank {self.rank}: the tensor of rank {peer}", tensor)
        if self.rank in receives or self.rank in sends:
            kept = [tensors[self.rank].numel() for tensors in (receives, sends) if self.rank in tensors]
            if len(kept) != 2 or kept[0] != kept[1]:
                raise ConfigError(
                    f"exchange '{name}' on rank {self.rank}: the tensors that it sends to itself and receives from "
                    f"itself differ in size. Pass tensors of one size, or neither."
                )
        self.traffic.record_to(name, {peer: t.numel() * t.element_size() for peer, t in sends.items()})
        return self._exchange(name, receives, sends)

    @final
    def swap(self, name: str, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> Pending:
        """Run an `exchange` as one `all_to_all`: every rank of the group calls, in the order of its other calls.

        On busy cores gloo is many times faster at one all-to-all than at single messages. All tensors have one dtype;
        a missing entry counts as empty.
        """
        like = next(iter(sends.values()), None)
        if like is None:
            like = next(iter(receives.values()), torch.empty(0, device=self.device))
        parts = [sends.get(rank, like.new_empty(0)) for rank in range(self.size)]
        into = [receives.get(rank, like.new_empty(0)) for rank in range(self.size)]
        sizes = [part.numel() for part in into]
        full = [part for part in into if part.numel()]
        # With one sending peer, receive directly into its tensor.
        output = full[0] if len(full) == 1 else like.new_empty(sum(sizes))
        filled = [part for part in parts if part.numel()]
        input = filled[0] if len(filled) == 1 else torch.cat(parts)
        handle = self.all_to_all(name, output, input, sizes, [part.numel() for part in parts])
        return _SwapHandle(handle, into if len(full) > 1 else [], sizes)

    @final
    def all_reduce_(self, name: str, tensor: Tensor) -> Handle:
        """Replace `tensor` (contiguous) by its sum over all ranks; the result is the same bits on every rank.

        The order of the sum is the backend's; the thread group adds in the order of the ranks.
        """
        if not tensor.is_contiguous():
            raise ConfigError(
                f"all_reduce '{name}' on rank {self.rank}: the tensor is not contiguous, so the sum would be written "
                f"to a copy. Pass .contiguous()."
            )
        self.traffic.record_ring(name, tensor.numel(), tensor.element_size())
        return self._all_reduce_(name, tensor)

    @final
    def split(self, name: str) -> Group:
        """Open a second channel over the same ranks; its calls and this group's may interleave freely.

        All ranks call it, in the same order. The channel adds to the same `traffic`.
        """
        return self.partition(name, (tuple(range(self.size)),))

    @abstractmethod
    def partition(self, name: str, parts: Sequence[Sequence[int]]) -> Group:
        """Open a channel for each part and return that of this rank; within a part, ranks are numbered from 0.

        All ranks call it with the same `parts`: ascending ranks, every rank in one part. The channels also add to this
        group's traffic.
        """

    @final
    def all_gather_object(self, obj: object) -> list[object]:
        """Return every rank's object, in the order of the ranks. Slow; for small objects in start-up checks.

        Objects are pickled, so every rank gets its own copy. Unpickling trusts all ranks of the group.
        """
        mine = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(self.device)
        sizes_W = torch.full((self.size,), mine.numel(), dtype=torch.int64, device=self.device)
        ones = [1] * self.size
        sizes = self._all_to_all("object sizes", torch.zeros_like(sizes_W), sizes_W, ones, ones).wait().tolist()
        received = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        to_all = [mine.numel()] * self.size
        self._all_to_all("objects", received, mine.repeat(self.size), sizes, to_all).wait()
        return [pickle.loads(part.numpy().tobytes()) for part in received.cpu().split(sizes)]

    @final
    def barrier(self) -> None:
        """Return when all ranks have called it."""
        here_W = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
        ones = [1] * self.size
        self._all_to_all("barrier", torch.zeros_like(here_W), here_W, ones, ones).wait().cpu()

    @abstractmethod
    def begin(self, operation: str) -> None:
        """Return when all ranks have begun this operation, which is not part of the training step.

        Args:
            operation: its name in errors.

        Raises:
            CommsError: on all ranks, if a rank has begun another operation or waits for this rank in another call.
        """

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Make pending and later calls of all other ranks raise, naming this rank and `error`. Never waits."""

    @abstractmethod
    def close(self) -> None:
        """Close a channel that `split` or `partition` opened; a second call does nothing. Never waits."""

    @abstractmethod
    def _all_to_all(
        self, name: str, output: Tensor | None, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle: ...  # fmt: skip

    @abstractmethod
    def _exchange(self, name: str, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> Pending: ...

    @abstractmethod
    def _all_reduce_(self, name: str, tensor: Tensor) -> Handle: ...

    def _part_of_this_rank(self, name: str, parts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Return the index of this rank's part and its position there; raise unless every rank is in one part."""
        if sorted(rank for part in parts for rank in part) != list(range(self.size)) or any(
            list(part) != sorted(part) for part in parts
        ):
            raise ConfigError(
                f"partition '{name}' on rank {self.rank}: got parts {[_few(part) for part in parts[:8]]}; expected "
                f"each of the ranks 0 to {self.size - 1} in one part, ascending."
            )
        return next((index, list(part).index(self.rank)) for index, part in enumerate(parts) if self.rank in part)

    def _check_part(self, side: str, name: str, tensor: Tensor, splits: Sequence[int]) -> None:
        _check_flat(f"all_to_all '{name}' on rank {self.rank}: {side}", tensor)
        if len(splits) != self.size or sum(splits) != tensor.numel() or (splits and min(splits) < 0):
            raise ConfigError(
                f"all_to_all '{name}' on rank {self.rank}: {side}_splits {_few(splits)} for {tensor.numel()} elements; "
                f"expected {self.size} counts, none negative, that sum to the tensor's length."
            )


def _check_flat(subject: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ConfigError(
            f"{subject} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected a 1-D contiguous "
            f"tensor. Pass .contiguous().view(-1)."
        )


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"[{shown}, … {len(numbers)} in all]" if len(numbers) > 8 else f"[{shown}]"
