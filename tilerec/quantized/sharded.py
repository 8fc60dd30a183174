"""Quantized tables on several devices of one process: each device looks up its tiles, and the results meet on one.

    ids ──► every device that has tiles     each pools the rows of its tiles     rows ──► the first device

This is for models whose tables exceed the memory of one GPU. On CPUs all devices are the same memory: the results are
right, and nothing is gained. Nothing overlaps by design; GPUs run at the same time, as their launches do not wait.

Columns of a quantized row are codes of whole bytes, so a column cut has the bits of the whole table. Row ranges are
summed one after the other, so sums of several rows may round differently. Ids of the rows of a range are selected on
its device, which waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.feature_reads import FeatureRead, feature_reads, key_positions
from tilerec.ops.quantized.row_format import HEAD_BYTES, row_bytes
from tilerec.quantized.embedding import QuantEmbeddingCollection
from tilerec.quantized.embedding_bag import QuantEmbeddingBagCollection
from tilerec.quantized.row_type import RowType
from tilerec.quantized.table import QuantTable
from tilerec.sparse.columns import Columns
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.table import EmbeddingBagConfig, PoolingType
from tilerec.spec.tile import Tile, Tiling


def tile_rows(rows: Tensor, row_type: RowType, tile: Tile, name: str) -> Tensor:
    """Return the served rows of a tile; raise a `ConfigError` for columns that do not begin with a byte."""
    if not row_type.bits:
        return rows[tile.r0 : tile.r1, tile.c0 : tile.c1]
    bits, width = row_type.bits, tile.c1 - tile.c0
    if tile.c0 * bits % 8:
        raise ConfigError(
            f"Table '{name}': got columns from {tile.c0} of {row_type.name} rows; expected a multiple of {8 // bits}, "
            "whose codes begin a byte. Cut the columns elsewhere."
        )
    own = rows[tile.r0 : tile.r1]
    out = own.new_zeros(own.shape[0], row_bytes(width, bits))
    first, count = HEAD_BYTES + tile.c0 * bits // 8, -(-width * bits // 8)
    out[:, :HEAD_BYTES] = own[:, :HEAD_BYTES]
    out[:, HEAD_BYTES : HEAD_BYTES + count] = own[:, first : first + count]
    return out


@dataclass(frozen=True)
class _Piece:
    """A tile on a device: its table's name there, and its rows if they are not all."""

    table: str
    tile: Tile
    first: bool  # of its column block's row ranges
    last: bool

    @property
    def is_range(self) -> bool:
        return not (self.first and self.last)


class ShardedQuantEmbeddingBagCollection(nn.Module):
    """A `QuantEmbeddingBagCollection` whose tables lie on several devices, in tiles.

    Args:
        module: the whole collection.
        tilings: of each table, by name; the first owner of a tile is the number of its device.
        devices: results are on the first.

    Raises:
        ConfigError: columns are cut inside a byte.
    """

    def __init__(
        self, module: QuantEmbeddingBagCollection, tilings: Mapping[str, Tiling], devices: Sequence[torch.device]
    ) -> None:
        super().__init__()
        self._configs = tuple(module.embedding_bag_configs())
        self._devices, self._is_weighted = tuple(devices), module.is_weighted()
        self._reads = feature_reads(self._configs, type(self).__name__)
        self._columns = Columns([read.name for read in self._reads], [read.dim for read in self._reads])
        self._pieces: dict[str, list[tuple[int, _Piece]]] = {}  # by table: device and piece, in the order of columns
        members: dict[int, list[tuple[EmbeddingBagConfig, RowType, QuantTable]]] = {}
        for config in self._configs:
            table, own = module.embedding_bags[config.name], self._pieces.setdefault(config.name, [])
            for block in tilings[config.name].blocks:
                for i, owners in enumerate(block.owners):
                    tile = Tile(block.cuts[i], block.cuts[i + 1], block.c0, block.c1, owners)
                    piece = _Piece(f"{config.name}[{tile.r0}:{tile.c0}]", tile, i == 0, i == len(block.owners) - 1)
                    memory = tile_rows(table.weight, table.row_type, tile, config.name).to(devices[owners[0]])
                    part = _piece_config(config, piece, len(block.owners) > 1)
                    members.setdefault(owners[0], []).append(
                        (part, table.row_type, QuantTable(part, table.row_type, memory))
                    )
                    own.append((owners[0], piece))
        self._ranges = {
            device: [piece for pieces in self._pieces.values() for d, piece in pieces if d == device and piece.is_range]
            for device in members
        }
        self.parts = nn.ModuleDict(
            {
                str(device): QuantEmbeddingBagCollection(
                    [config for config, _, _ in own], [row_type for _, row_type, _ in own], self._is_weighted,
                    output_dtype=torch.float32 if self._ranges[device] else module.output_dtype(),
                    modules=[table for _, _, table in own],
                )
                for device, own in members.items()
            }
        )  # fmt: skip
        self._output_dtype = module.output_dtype()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool, as `QuantEmbeddingBagCollection.forward`; results are on the first device.

        Raises:
            InputError: as there; or a variable batch.
        """
        if features.variable_stride_per_key():
            raise InputError(
                f"{type(self).__name__}: got a batch with a batch size per key; expected one batch size. Expand the "
                "batch by its inverse indices first."
            )
        key_positions(type(self).__name__, self._reads, features.keys())
        found: dict[int, dict[str, Tensor]] = {}
        for name, part in self.parts.items():
            device = int(name)
            own = features.to(self._devices[device])
            found[device] = part(self._with_ranges(own, device)).to_dict()
        blocks = [self._block(read, features, found) for read in self._reads]
        if not blocks:
            blocks = [torch.empty(features.stride(), 0, dtype=self._output_dtype, device=self._devices[0])]
        return KeyedTensor.from_columns(self._columns, torch.cat(blocks, dim=1))

    def _with_ranges(self, features: KeyedJaggedTensor, device: int) -> KeyedJaggedTensor:
        """Return the batch with one more feature for each read of a row range: the ids of the range, from its first."""
        ranges = self._ranges[device]
        if not ranges:
            return features
        every = dict(features.to_dict())
        features_of = {config.name: config.feature_names for config in self._configs}
        for table, pieces in self._pieces.items():
            for owner, piece in pieces:
                if owner == device and piece.is_range:
                    every |= {_key(name, piece): _in_range(every[name], piece) for name in features_of[table]}
        return KeyedJaggedTensor.from_jt_dict(every)

    def _block(self, read: FeatureRead, features: KeyedJaggedTensor, found: Mapping[int, dict[str, Tensor]]) -> Tensor:
        """Return the columns of one read, on the first device."""
        columns: list[Tensor] = []
        ranged = False
        for device, piece in self._pieces[read.table]:
            values = found[device]
            key = _key(read.feature, piece)
            own = values[key] if key in values else values[f"{key}@{piece.table}"]
            own = own.to(self._devices[0])
            ranged = ranged or piece.is_range
            if piece.first:
                columns.append(own)
            else:
                columns[-1] = columns[-1] + own
        block = torch.cat(columns, dim=1)
        if ranged and read.mean:
            lengths_B = features[read.feature].lengths().to(self._devices[0])
            block = block / lengths_B.clamp(min=1).to(block.dtype)[:, None]
        return block.to(self._output_dtype)


def _key(feature: str, piece: _Piece) -> str:
    return f"{feature}[{piece.tile.r0}:{piece.tile.r1}]" if piece.is_range else feature


def _piece_config(config: EmbeddingBagConfig, piece: _Piece, in_ranges: bool) -> EmbeddingBagConfig:
    """Return the config of a tile's table; a mean over row ranges is divided after their sum."""
    tile = piece.tile
    return replace(
        config,
        name=piece.table,
        num_embeddings=tile.r1 - tile.r0,
        embedding_dim=tile.c1 - tile.c0,
        feature_names=[_key(name, piece) for name in config.feature_names],
        pooling=PoolingType.SUM if in_ranges else config.pooling,
    )


def _in_range(jagged: JaggedTensor, piece: _Piece) -> JaggedTensor:
    """Return the ids of a row range, counted from its first row. Ids outside of the table go to its ends, and raise."""
    ids_N, weights_N = jagged.values(), jagged.weights_or_none()
    keep_N = torch.ones_like(ids_N, dtype=torch.bool)
    if not piece.first:
        keep_N &= ids_N >= piece.tile.r0
    if not piece.last:
        keep_N &= ids_N < piece.tile.r1
    counts_N1 = torch.nn.functional.pad(keep_N.cumsum(0), (1, 0))
    lengths_B = counts_N1[jagged.offsets().long()].diff()
    return JaggedTensor(ids_N[keep_N] - piece.tile.r0, None if weights_N is None else weights_N[keep_N], lengths_B)


class ShardedQuantEmbeddingCollection(nn.Module):
    """A `QuantEmbeddingCollection` whose tables lie on several devices, each on one.

    Args:
        module: the whole collection.
        devices_of: number of each table's device, by name.
        devices: results are on the first.
    """

    def __init__(
        self, module: QuantEmbeddingCollection, devices_of: Mapping[str, int], devices: Sequence[torch.device]
    ) -> None:
        super().__init__()
        configs = module.embedding_configs()
        self._devices = tuple(devices)
        self._names = [read.name for read in feature_reads(configs, type(self).__name__)]
        parts = {}
        for device in sorted(set(devices_of.values())):
            own = [config for config in configs if devices_of[config.name] == device]
            tables = [module.embeddings[config.name] for config in own]
            parts[str(device)] = QuantEmbeddingCollection(
                own, [table.row_type for table in tables], need_indices=module.need_indices(),
                output_dtype=module.output_dtype(), modules=tables,
            ).to(devices[device])  # fmt: skip
        self.parts = nn.ModuleDict(parts)
        # A feature of tables on several devices has another name in a part with one of them.
        self._part_of = {read.name: (str(devices_of[read.table]), read) for read in feature_reads(configs, "")}

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up the row of every id, as `QuantEmbeddingCollection.forward`; results are on the first device."""
        found = {name: part(features.to(self._devices[int(name)])) for name, part in self.parts.items()}
        results = {}
        for name in self._names:
            device, read = self._part_of[name]
            own = found[device]
            results[name] = own[name if name in own else read.feature].to(self._devices[0])
        return results
