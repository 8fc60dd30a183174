"""`Group`: the ranks that hold a model's tables, and the few ways in which they talk.

Glossary
    rank        one of `size` peers, 0 <= rank < size; each holds its own `Group` object
    call        one collective; every rank of the group makes the same calls in the same order
    name        what a call carries ("ids", "rows"): labels its traffic and its errors, and is the same on every rank
    handle      a call that has begun; `.wait()` ends it
    channel     calls of one channel keep their order; `split` opens another that knows nothing of the first
    splits      elements for each rank: a 1-D tensor is part 0 | part 1 | … | part W-1, parts may be empty

    all_to_all:  output part p of rank r  =  input part r of rank p

Two implementations: `ProcessGroupComms` over `torch.distributed` (gloo, NCCL), `ThreadGroup` for ranks that are threads
of one process. Whatever runs on the one runs on the other.

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
        """The output, complete (on a GPU: for the current stream). A second call returns it again at once.

        Raises `CommsError` if a peer failed, died, disagreed or did not come in time.
        """


class Pending(Protocol):
    """A call without a result. It keeps the call's tensors alive."""

    def wait(self) -> None:
        """Return when the tensors may be read and written. Raises like `Handle.wait`."""


class _Swapped:
    """A `swap` that has begun."""

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
    traffic: what this rank sent, counted by name and peer.
    device: where the group's own small messages live: the CPU, or the rank's GPU under NCCL.
    """

    def __init__(self, rank: int, size: int, traffic: Traffic, device: torch.device | None = None) -> None:
        if not 0 <= rank < size:
            raise ConfigError(
                f"Group: rank {rank} is outside [0, {size}); a rank counts from 0 to its group's size."
            )
        self.rank = rank
        self.size = size
        self.traffic = traffic
        self.device = torch.device("cpu") if device is None else device

    @final
    def all_to_all(
        self,
        name: str,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:
        """Send part p of `input` to every rank p; receive part p of `output` from every rank p.

        Args:
            output, input: 1-D, contiguous, one dtype (any) and device; they must not overlap, and nobody touches them
                before `wait`.
            output_splits, input_splits: elements from and to each rank, [W]; they sum to the tensors' lengths. Rank p's
                `input_splits[r]` is rank r's `output_splits[p]`: sizes are known to both sides.

        W = 2; rank 0 sends [7] to itself and [8, 9] to rank 1, rank 1 sends [5] to rank 0 and nothing to itself: rank 0
        ends with [7, 5], rank 1 with [8, 9].
        """
        self._check_part("output", name, output, output_splits)
        self._check_part("input", name, input, input_splits)
        if output.dtype != input.dtype or output.device != input.device:
            raise ConfigError(
                f"all_to_all '{name}' on rank {self.rank}: input is {input.dtype} on {input.device}, output "
                f"{output.dtype} on {output.device}; wanted one dtype and device."
            )
        self.traffic.record(name, input_splits, input.element_size())
        return self._all_to_all(name, output, input, output_splits, input_splits)

    @final
    def exchange(self, name: str, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> Pending:
        """Point to point: fill each tensor of `receives` from its rank, send each of `sends` to its rank.

        Tensors are 1-D and contiguous, of any dtype; both sides know the sizes. Ranks that nobody names take no part
        (they do not call), a peer's entry may be empty, and what a rank sends to itself is copied. Messages between
        two ranks under one name arrive in the order in which they were sent.
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
                    f"exchange '{name}' on rank {self.rank}: what it sends to itself and receives from itself differ; "
                    f"pass tensors of one size, or neither."
                )
        self.traffic.record_to(name, {peer: t.numel() * t.element_size() for peer, t in sends.items()})
        return self._exchange(name, receives, sends)

    @final
    def swap(self, name: str, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> Pending:
        """`exchange` where every rank of the group calls, in the order of its other calls: one `all_to_all`.

        On busy cores gloo is many times faster at that than at single messages. All tensors have one dtype; what is not
        named is empty.
        """
        like = next(iter(sends.values()), None)
        if like is None:
            like = next(iter(receives.values()), torch.empty(0, device=self.device))
        parts = [sends.get(rank, like.new_empty(0)) for rank in range(self.size)]
        into = [receives.get(rank, like.new_empty(0)) for rank in range(self.size)]
        sizes = [part.numel() for part in into]
        full = [part for part in into if part.numel()]
        # One peer: straight into its tensor.
        output = full[0] if len(full) == 1 else like.new_empty(sum(sizes))
        filled = [part for part in parts if part.numel()]
        input = filled[0] if len(filled) == 1 else torch.cat(parts)
        handle = self.all_to_all(name, output, input, sizes, [part.numel() for part in parts])
        return _Swapped(handle, into if len(full) > 1 else [], sizes)

    @final
    def all_reduce_(self, name: str, tensor: Tensor) -> Handle:
        """Replace `tensor` (contiguous) by its sum over all ranks; the result is the same bits on every rank.

        The order of the sum is the backend's; the thread group adds in the order of the ranks.
        """
        if not tensor.is_contiguous():
            raise ConfigError(
                f"all_reduce '{name}' on rank {self.rank}: the tensor is not contiguous, so a sum in place would go to "
                f"a copy; pass .contiguous()."
            )
        self.traffic.record_ring(name, tensor.numel(), tensor.element_size())
        return self._all_reduce_(name, tensor)

    @final
    def split(self, name: str) -> Group:
        """A second channel over the same ranks: its calls and this group's may interleave freely.

        All ranks call it, in the same order. It counts into the same `traffic`.
        """
        return self.partition(name, (tuple(range(self.size)),))

    @abstractmethod
    def partition(self, name: str, parts: Sequence[Sequence[int]]) -> Group:
        """A channel for each part, and this rank's own returned; ranks count anew from 0 within their part.

        All ranks call it with the same `parts`: ascending ranks, every rank in one part. Traffic is counted here, too.
        """

    @final
    def all_gather_object(self, obj: object) -> list[object]:
        """Every rank's object, in the order of the ranks. Small and slow: for checks at the start.

        Objects are pickled, so every rank gets its own copy; group members trust each other.
        """
        mine = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(self.device)
        sizes_W = torch.full((self.size,), mine.numel(), dtype=torch.int64, device=self.device)
        ones = [1] * self.size
        sizes = (
            self._all_to_all("object sizes", torch.zeros_like(sizes_W), sizes_W, ones, ones).wait().tolist()
        )
        received = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        to_all = [mine.numel()] * self.size
        self._all_to_all("objects", received, mine.repeat(self.size), sizes, to_all).wait()
        return [pickle.loads(bytes(part.tolist())) for part in received.cpu().split(sizes)]

    @final
    def barrier(self) -> None:
        """Return when all ranks have called it."""
        here_W = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
        ones = [1] * self.size
        self._all_to_all("barrier", torch.zeros_like(here_W), here_W, ones, ones).wait().cpu()

    @final
    def begin(self, operation: str) -> None:
        """Return when all ranks have begun this operation: one outside of the training step, by its name in errors.

        Raises:
            CommsError: on all ranks, where a rank has begun another operation, or waits for this one in another call.
        """
        self._begin(operation)

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Give up: every other rank's pending and later calls raise, naming this rank and `error`. Never waits."""

    @abstractmethod
    def close(self) -> None:
        """Give back a channel that `split` or `partition` opened; a second call does nothing. Never waits."""

    @abstractmethod
    def _begin(self, operation: str) -> None: ...

    @abstractmethod
    def _all_to_all(
        self,
        name: str,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle: ...

    @abstractmethod
    def _exchange(
        self, name: str, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]
    ) -> Pending: ...

    @abstractmethod
    def _all_reduce_(self, name: str, tensor: Tensor) -> Handle: ...

    def _part_of_this_rank(self, name: str, parts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Which part this rank is in, and its place there; refuses parts that do not hold every rank once."""
        if sorted(rank for part in parts for rank in part) != list(range(self.size)) or any(
            list(part) != sorted(part) for part in parts
        ):
            raise ConfigError(
                f"partition '{name}' on rank {self.rank}: parts {[_few(part) for part in parts[:8]]}; wanted each of "
                f"the ranks 0 to {self.size - 1} in one part, ascending."
            )
        return next(
            (index, list(part).index(self.rank)) for index, part in enumerate(parts) if self.rank in part
        )

    def _check_part(self, side: str, name: str, tensor: Tensor, splits: Sequence[int]) -> None:
        _check_flat(f"all_to_all '{name}' on rank {self.rank}: {side}", tensor)
        if len(splits) != self.size or sum(splits) != tensor.numel() or (splits and min(splits) < 0):
            raise ConfigError(
                f"all_to_all '{name}' on rank {self.rank}: {side}_splits {_few(splits)} for {tensor.numel()} elements; "
                f"wanted {self.size} counts, none negative, that sum to the tensor's length."
            )


def _check_flat(what: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ConfigError(
            f"{what} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; wanted a 1-D contiguous tensor, "
            f"so pass .contiguous().view(-1)."
        )


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"[{shown}, … {len(numbers)} in all]" if len(numbers) > 8 else f"[{shown}]"
