"""`SASRecTower`: the vectors of sequences, or of items, of a `SASRec`, for servers.

    score of item i after a sequence = <query vector, candidate vector of i>

Legend: B samples, N items of all sequences, L longest sequence, D dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.models.sasrec import EncoderParts, SASRec, encode
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class SASRecTower(nn.Module):
    """One side of a `SASRec`; it shares all weights.

    Sequences are padded to the model's `max_length`, so an exported tower takes any number and length of them. Of a
    longer one, the newest items count.

    Args:
        sasrec: unsharded.
        side: "query" for vectors of sequences, "candidate" for those of items.

    Attributes:
        features: name of the feature that is read: items of a sequence, the newest last, or one item per sample.

    Shape: a `KeyedJaggedTensor` of B samples, with at least that feature, to [B, D]. Samples without items get zeros.

    State: as in `SASRec`; the candidate side has the table only. Dropout is off: put the model into evaluation mode.

    Raises:
        ConfigError: another side, or a table that is sharded or has managed ids.
    """

    def __init__(self, sasrec: SASRec, side: str) -> None:
        super().__init__()
        tables = sasrec.embedding_collection
        if side not in ("query", "candidate"):
            raise ConfigError(f"SASRecTower: got side='{side}'; expected 'query' or 'candidate'.")
        if type(tables) is not EmbeddingCollection:
            raise ConfigError(
                f"SASRecTower: got a table in a {type(tables).__name__}; expected an unsharded EmbeddingCollection. "
                "Gather the model first."
            )
        query = side == "query"
        self.features = [sasrec.sequence if query else sasrec.target]
        (config,) = tables.embedding_configs()
        self.embedding_collection = EmbeddingCollection(
            [replace(config, feature_names=self.features)], device=torch.device("meta"), on_bad_id=tables._on_bad_id
        )
        self.embedding_collection.embeddings[config.name] = tables.embeddings[config.name]
        self.max_length = sasrec.max_length if query else 1
        self.positions = sasrec.positions if query else None
        self.blocks = sasrec.blocks if query else None
        self.last_norm = sasrec.last_norm if query else None

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the vectors of this side [B, D]."""
        found = self.embedding_collection(sparse_features)[self.features[0]]
        rows_ND = found.values()
        offsets = found.offsets().to(torch.int64)
        lengths_B = (offsets[1:] - offsets[:-1]).clamp(max=self.max_length)
        place_L = torch.arange(self.max_length, device=rows_ND.device)
        has_BL = place_L < lengths_B[:, None]
        # The row of zeros behind the items is read at the places of the padding.
        at_BL = torch.where(has_BL, (offsets[1:] - lengths_B)[:, None] + place_L, rows_ND.shape[0])
        x_BLD = torch.cat([rows_ND, rows_ND.new_zeros(1, rows_ND.shape[1])])[at_BL]
        if self.positions is not None and self.blocks is not None and self.last_norm is not None:
            x_BLD = encode(x_BLD, lengths_B, EncoderParts(self.positions, self.blocks, self.last_norm, 0.0))
        last_B1D = (lengths_B - 1).clamp(min=0)[:, None, None].expand(-1, 1, x_BLD.shape[2])
        vector_BD = x_BLD.gather(1, last_B1D)[:, 0]
        return torch.where((lengths_B > 0)[:, None], vector_BD, 0.0)
