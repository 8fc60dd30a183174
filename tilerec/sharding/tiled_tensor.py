"""Convert logical tensors to torch tensors: plain tensors, DTensors, and a DTensor subclass for every other tiling.

    whole on every rank                                  -> a plain tensor
    rows or columns cut as torch cuts them (ceil chunks
    over all ranks in order)                             -> a plain DTensor, Shard(0) or Shard(1)
    anything else                                        -> `TiledTensor`

`TiledTensor` is a DTensor subclass, so torch's checkpoints treat it as a DTensor. It has its own placement type, so no
code can mistake it for a `Shard`.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.sharding.logical import Cover, LogicalTensor, Piece
from tilerec.spec.tile import Rectangle, Tile, ceil_chunks
from tilerec.torch_private import (
    LOCAL_SCALAR_DENSE,
    TO_COPY,
    DispatchMode,
    local_tensor,
    new_dtensor,
    pytree,
    without_torch_function,
)


class Tiled(Placement):
    """Placement of a `TiledTensor`: neither a `Shard` nor a `Replicate`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tiled)

    def __hash__(self) -> int:
        return hash(Tiled)

    def __repr__(self) -> str:
        return "Tiled()"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Tiled, ())  # the inherited default cannot pickle a subclass of torch's placements


@final
class TiledTensor(DTensor):
    """A logical tensor distributed over ranks in a way that torch's placements cannot describe.

    `full_tensor()` returns the whole tensor on every rank; `pieces()` returns the rectangles of this rank.
    `torch.distributed.checkpoint` saves it, and loads it under any other tiling, placement or world size. It supports
    only copies, conversions and fills; use `full_tensor()` for arithmetic.
    """

    logical: LogicalTensor

    def __new__(cls, logical: LogicalTensor, mesh: DeviceMesh) -> TiledTensor:
        shape = logical.cover.shape
        local = _local(logical)
        made = new_dtensor(cls, local, mesh, (Tiled(),), torch.Size(shape), _strides(shape))
        made.logical = logical
        return made

    def __init__(self, logical: LogicalTensor, mesh: DeviceMesh) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        held = ", ".join(str(rectangle) for rectangle, _ in self.pieces()) or "nothing"
        return f"TiledTensor(shape={tuple(self.shape)}, dtype={self.dtype}, here: {held})"

    def pieces(self) -> list[tuple[Rectangle, Tensor]]:
        """Return the rectangles that this rank holds, with views of their memory."""
        return [(self.logical.cover.tiles[t].rectangle, memory) for t, memory in self.logical.pieces]

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole tensor, on every rank, without a gradient. Collective."""
        self.logical.group.begin("full_tensor")
        return self.logical.full()

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Return this rank's rectangle; it has no rows if this rank holds none.

        Raises:
            ConfigError: this rank holds several; see `pieces`.
        """
        if len(self.logical.pieces) > 1:
            raise ConfigError(
                f"{self!r}: this rank holds {len(self.logical.pieces)} rectangles, which are not one tensor; use "
                ".pieces(), or .full_tensor()."
            )
        return local_tensor(self)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Return a plain DTensor with torch's placements: every rank gathers the whole and keeps its part."""
        mesh = device_mesh or self.device_mesh
        wanted = tuple(placements or (Replicate(),) * mesh.ndim)
        local = self.full_tensor()
        for axis, placement in enumerate(wanted):
            if isinstance(placement, Shard):
                own = mesh.get_local_rank(axis)
                parts = local.chunk(mesh.size(axis), placement.dim)
                empty = local.narrow(placement.dim, 0, 0)
                local = parts[own] if own < len(parts) else empty
            elif not isinstance(placement, Replicate):
                raise ConfigError(f"{self!r}: got placement {placement}; expected Shard or Replicate.")
        return DTensor.from_local(
            local.contiguous(), mesh, wanted, run_check=False, shape=self.shape, stride=self.stride()
        )

    # ------------------------------------------------------------------------------------ torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        cover, me = self.logical.cover, self.logical.group.rank
        items, seen = [], set()
        for t, memory in self.logical.pieces:
            tile = cover.tiles[t]
            if tile.owners[0] != me or t not in cover.written or t in seen:
                continue
            seen.add(t)
            offsets, sizes = torch.Size(cover.offsets(tile)), torch.Size(cover.extent(tile))
            items.append(
                WriteItem(
                    index=MetadataIndex(fqn, offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                        properties=TensorProperties.create_from_tensor(memory),
                        size=self.size(),
                    ),
                )
            )
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        cover = self.logical.cover
        return [
            ChunkStorageMetadata(
                offsets=torch.Size(cover.offsets(cover.tiles[t])),
                sizes=torch.Size(cover.extent(cover.tiles[t])),
            )
            for t, _ in self.logical.pieces
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        cover, pieces = self.logical.cover, self.logical.pieces
        if index.index is not None and index.index < len(pieces):
            t, memory = pieces[index.index]
            if index.offset is None or tuple(index.offset) == cover.offsets(cover.tiles[t]):
                return memory
        for t, memory in pieces:
            if index.offset is not None and tuple(index.offset) == cover.offsets(cover.tiles[t]):
                return memory
        raise ValueError(f"{index.fqn}: {self!r} has nothing at {index.offset}.")

    # ---------------------------------------------------------------------------------------------------- operators

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch 2.11 sends operators of a DTensor's subclass to DTensor's own dispatcher. A mode comes first.
        with without_torch_function(), _Operators():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], TiledTensor) else None
        if own is not None and func in _PIECE_BY_PIECE:
            logical = own.logical.mapped(lambda memory: func(memory, *args[1:], **kwargs))
            return TiledTensor(logical, own.device_mesh)
        if own is not None and func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(own.shape):
            # torch's asynchronous checkpoints copy tensors this way: new_empty, then a fill of the pieces.
            options = {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}
            return TiledTensor(own.logical.mapped(lambda memory: torch.empty_like(memory, **options)), own.device_mesh)
        if own is not None and func in _IN_PLACE:
            for memory in own.logical.memories():
                func(memory, *args[1:], **kwargs)
            return own
        if own is not None and func is torch.ops.aten.copy_.default:
            load(own.logical, args[1])
            return own
        if own is not None and func is LOCAL_SCALAR_DENSE and own.logical.pieces:
            return func(own.logical.pieces[0].memory)
        return _refuse(func, own if own is not None else next(a for a in args if isinstance(a, TiledTensor)))

    def __deepcopy__(self, memo: dict[int, Any]) -> TiledTensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise pickle.PicklingError(
            f"{self!r}: a file written by pickle or torch.save would hold this rank's part only; save with "
            "torch.distributed.checkpoint, or whole with torch.save(tilerec.parallel.full_state_dict(module))."
        )


class _Operators(DispatchMode):
    """Sends operators of tensors in tiles to `TiledTensor.__torch_dispatch__`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, TiledTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return TiledTensor.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)


def _refuse(func: Any, tensor: TiledTensor) -> NoReturn:
    raise ConfigError(
        f"{tensor!r}: {func} is not supported for tensors in tiles; use .full_tensor() (on all ranks) or .pieces()."
    )


_aten = torch.ops.aten
_PIECE_BY_PIECE = (
    _aten.detach.default, _aten.alias.default, _aten.clone.default, TO_COPY, _aten.zeros_like.default,
    _aten.ones_like.default, _aten.empty_like.default, _aten.full_like.default,
)  # fmt: skip
_IN_PLACE = (_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor)


def shown(logical: LogicalTensor) -> Tensor:
    """Convert a logical tensor that is not whole on every rank to a DTensor or `TiledTensor`; see the module docstring.

    Raises:
        ConfigError: it is spread over ranks that are threads, for which torch has no DTensors.
    """
    group, cover = logical.group, logical.cover
    if not isinstance(group, ProcessGroupComms):
        raise ConfigError(
            "state_dict: ranks that are threads have no DTensors, and this table is spread over several; gather whole "
            "tensors with tilerec.parallel.full_state_dict(module), or run the ranks as processes (run_ranks)."
        )
    mesh = _mesh_of(group, logical.like.device.type)
    # A write to a plain DTensor would not reach the copies of hot rows.
    dim = cover.shard_dim(group.size) if logical.copies is None else None
    if dim is None:
        return TiledTensor(logical, mesh)
    return DTensor.from_local(
        _local(logical),
        mesh,
        (Shard(dim),),
        run_check=False,
        shape=torch.Size(cover.shape),
        stride=_strides(cover.shape),
    )


# A group's mesh never changes, and building one takes longer than the rest of a table's state-dict entry.
_MESHES: weakref.WeakKeyDictionary[ProcessGroupComms, dict[str, DeviceMesh]] = weakref.WeakKeyDictionary()


def _mesh_of(group: ProcessGroupComms, device_type: str) -> DeviceMesh:
    """Return the mesh of all ranks of a group; create it on first use."""
    meshes = _MESHES.setdefault(group, {})
    if device_type not in meshes:
        meshes[device_type] = DeviceMesh.from_group(group.process_group, device_type)
    return meshes[device_type]


def _local(logical: LogicalTensor) -> Tensor:
    """Return this rank's first piece, or an empty tensor, as a storage of its own over the same memory.

    torch's asynchronous checkpoints cannot copy a DTensor whose local part begins inside a storage.
    """
    if not logical.pieces:
        return logical.like.new_empty((0, *logical.cover.shape[1:]))
    memory = logical.pieces[0].memory
    if memory.is_meta or not memory.numel() or not memory.storage_offset() or not memory.is_contiguous():
        return memory
    begin = memory.storage_offset() * memory.element_size()
    storage = memory.untyped_storage()[begin : begin + memory.nbytes]
    return memory.new_empty(0).set_(storage, 0, memory.shape, memory.stride())


def load(logical: LogicalTensor, value: Tensor) -> None:
    """See `state.load`."""
    if isinstance(value, TiledTensor) and _same_ranks(value.device_mesh, logical.group):
        logical.load(value.logical)
        return
    if isinstance(value, DTensor):
        source = _as_logical(value, logical.group)
        if source is not None:
            logical.load(source)
            return
        ranks = value.device_mesh.mesh.flatten().tolist()
        if isinstance(logical.group, ProcessGroupComms):
            wanted = dist.get_process_group_ranks(logical.group.process_group)
            if not set(wanted) <= set(ranks):
                raise ConfigError(
                    f"load_state_dict: got a DTensor on ranks {ranks[:8]}; expected one on all of the table's ranks "
                    f"{wanted[:8]}, as a rank outside its mesh cannot read it. Gather it on its ranks and pass a plain "
                    "tensor on every rank."
                )
        value = value.full_tensor()
    logical.load_whole(value)


def _same_ranks(mesh: DeviceMesh, group: Group) -> bool:
    return isinstance(group, ProcessGroupComms) and mesh.mesh.tolist() == dist.get_process_group_ranks(
        group.process_group
    )


def _as_logical(value: DTensor, group: Group) -> LogicalTensor | None:
    """Return a plain DTensor cut along one dimension over the same ranks as a logical tensor; None for any other."""
    if len(value.placements) != 1 or not _same_ranks(value.device_mesh, group):
        return None
    placement = value.placements[0]
    if type(placement) is not Shard:
        return None
    shape = tuple(value.shape)
    columns = shape[1] if len(shape) == 2 else 1
    tiles = [
        Tile(*((r0, r1, 0, columns) if placement.dim == 0 else (0, shape[0], r0, r1)), (rank,))
        for rank, (r0, r1) in enumerate(pairwise(ceil_chunks(shape[placement.dim], group.size)))
    ]
    local = value.to_local()
    pieces = (Piece(group.rank, local),) if group.rank < len(tiles) else ()
    return LogicalTensor(Cover(shape, tuple(tiles), tuple(range(len(tiles)))), pieces, group, local.new_empty(0))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[1], 1) if len(shape) == 2 else (1,) * len(shape)
