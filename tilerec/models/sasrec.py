"""`SASRec`: self-attentive sequential recommendation (Kang and McAuley, ICDM 2018, 1808.09781).

    x_0 = sqrt(D) row(item) + position          dropout
    x   = x + dropout(attention(LN(x), x, x))   causal, for each block
    x   = x + FFN(LN(x))                        D -> D (ReLU) -> D, dropout after both
    state = LN(x)                               score of item i after position p = <state_p, row(i)>

Positions count from the end: the newest item of every sequence has the last position, as with padding on the left.

Legend: B sequences, N items of all sequences, L length of the longest, D dim, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class SASRecOutput(NamedTuple):
    """Output of `SASRec`.

    Attributes:
        states: of all positions, sequence by sequence [N, D].
        rows: of the sequences' items [N, D].
        target_rows: of the items of the feature `target` [its ids, D].
        candidate_rows: of the candidates [C, D]; None without candidates.
    """

    states: Tensor
    rows: Tensor
    target_rows: Tensor
    candidate_rows: Tensor | None


class SASRec(nn.Module):
    """Causal self-attention over sequences of items; one table for inputs and outputs.

    Args:
        embedding_collection: one table, with the features `sequence` and `target`.
        sequence: feature with the items of a sequence, the newest last.
        target: feature with the items that follow.
        max_length: longest sequence.
        num_blocks, num_heads: of the attention; heads divide D.
        dropout: probability.
        device: of all weights but the table's.

    Attributes:
        sequence, target, max_length: as given.

    State: `embedding_collection.*`, `positions`, `blocks.*`, `last_norm.*`.

    Raises:
        ConfigError: features that the table does not have, sizes that do not fit.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        *,
        sequence: str,
        target: str,
        max_length: int,
        num_blocks: int = 2,
        num_heads: int = 1,
        dropout: float = 0.2,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        configs = embedding_collection.embedding_configs()
        if len(configs) != 1 or {sequence, target} - set(configs[0].feature_names):
            tables = {config.name: config.feature_names for config in configs}
            raise ConfigError(
                f"SASRec: got tables {tables}; expected one table with the features {sequence!r} and {target!r}. Give "
                "both columns one table."
            )
        dim = configs[0].embedding_dim
        if max_length < 1 or num_blocks < 1 or num_heads < 1 or dim % num_heads or not 0 <= dropout < 1:
            raise ConfigError(
                f"SASRec: got max_length={max_length}, num_blocks={num_blocks}, num_heads={num_heads} and "
                f"dropout={dropout} for dim {dim}; expected counts of at least 1, heads that divide the dim, and a "
                "dropout in [0, 1). Correct them."
            )
        self.embedding_collection = embedding_collection
        self.sequence, self.target = sequence, target
        self._features = list(configs[0].feature_names)
        self.max_length, self._dim, self._dropout = max_length, dim, dropout
        self.positions = nn.Parameter(torch.empty(max_length, dim, device=device))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(_Block(dim, num_heads, dropout, device) for _ in range(num_blocks))
        self.last_norm = nn.LayerNorm(dim, eps=1e-8, device=device)

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the table); call the model with the returned features."""
        prefetched: KeyedJaggedTensor = self.embedding_collection.prefetch(sparse_features)
        return prefetched

    def forward(
        self, dense_features: Tensor, sparse_features: KeyedJaggedTensor, candidates: Tensor | None = None
    ) -> SASRecOutput:
        """Return states and rows.

        Args:
            dense_features: ignored.
            sparse_features: B samples of every feature of the table.
            candidates: ids [C] whose rows are looked up as well; on several ranks, all ranks pass some or none.

        Raises:
            InputError: a sequence is longer than `max_length`.
        """
        found = self.embedding_collection(sparse_features)
        sequence = found[self.sequence]
        states_ND = self._encode(sequence)
        candidate_CD = None
        if candidates is not None:
            candidate_CD = self.embedding_collection(self._as_features(candidates))[self.sequence].values()
        return SASRecOutput(states_ND, sequence.values(), found[self.target].values(), candidate_CD)

    def _as_features(self, ids: Tensor) -> KeyedJaggedTensor:
        """Return ids as one sequence; other features of the table are empty."""
        lengths = [ids.numel() if name == self.sequence else 0 for name in self._features]
        return KeyedJaggedTensor(self._features, ids, lengths=torch.tensor(lengths, device=ids.device), stride=1)

    def _encode(self, sequence: JaggedTensor) -> Tensor:
        lengths_B = sequence.lengths().to(torch.int64)
        longest = int(lengths_B.max()) if lengths_B.numel() else 0
        if longest > self.max_length:
            raise InputError(
                f"SASRec: got a sequence of {longest} items; expected at most max_length={self.max_length}. Set "
                "max_length of the data to at most that of the model."
            )
        # A batch without items keeps the same graph, so that all ranks have gradients of the same parameters.
        length = max(longest, 1)
        x_BLD = sequence.to_padded_dense(length)
        if not x_BLD.shape[0]:
            x_BLD, lengths_B = x_BLD.new_zeros(1, length, self._dim), lengths_B.new_zeros(1)
        has_BL = torch.arange(length, device=x_BLD.device) < lengths_B[:, None]
        parts = EncoderParts(self.positions, self.blocks, self.last_norm, self._dropout if self.training else 0.0)
        return encode(x_BLD, lengths_B, parts)[has_BL]


class EncoderParts(NamedTuple):
    """Weights of the encoder, and the probability of dropout."""

    positions: Tensor
    blocks: nn.ModuleList
    last_norm: nn.LayerNorm
    dropout: float


def encode(x_BLD: Tensor, lengths_B: Tensor, parts: EncoderParts) -> Tensor:
    """Return the states [B, L, D] of padded sequences of rows; those behind a sequence have no meaning."""
    positions = parts.positions
    place_L = torch.arange(x_BLD.shape[1], device=x_BLD.device)
    position_BL = (positions.shape[0] - lengths_B[:, None] + place_L).clamp(max=positions.shape[0] - 1)
    x_BLD = x_BLD * x_BLD.shape[2] ** 0.5 + positions[position_BL]
    x_BLD = dropout(x_BLD, parts.dropout, parts.dropout > 0)
    for block in parts.blocks:
        x_BLD = block(x_BLD)
    states: Tensor = parts.last_norm(x_BLD)
    return states


class _Block(nn.Module):
    """One layer of attention and one of a point-wise network."""

    def __init__(self, dim: int, num_heads: int, dropout: float, device: torch.device | None) -> None:
        super().__init__()
        self.heads, self._dropout = num_heads, dropout
        self.attention_norm = nn.LayerNorm(dim, eps=1e-8, device=device)
        self.query = nn.Linear(dim, dim, device=device)
        self.key_value = nn.Linear(dim, 2 * dim, device=device)
        self.output = nn.Linear(dim, dim, device=device)
        self.feed_norm = nn.LayerNorm(dim, eps=1e-8, device=device)
        self.feed = nn.Sequential(
            nn.Linear(dim, dim, device=device), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim, device=device)
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, dim = x_BLD.shape
        shape = (batch, length, self.heads, dim // self.heads)
        query = self.query(self.attention_norm(x_BLD)).view(shape).transpose(1, 2)
        key, value = (part.reshape(shape).transpose(1, 2) for part in self.key_value(x_BLD).chunk(2, dim=-1))
        # Sequences begin at place 0, so the causal mask alone hides the padding behind them.
        rate = self._dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        x_BLD = x_BLD + dropout(self.output(mixed.transpose(1, 2).reshape(x_BLD.shape)), rate, self.training)
        fed: Tensor = x_BLD + dropout(self.feed(self.feed_norm(x_BLD)), rate, self.training)
        return fed
