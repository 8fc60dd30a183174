"""DCN-V2 (Wang et al., 2008.13535): a cross network and an MLP over all features, for one task or several.

    x        = [pooled vectors of all features, dense features]          [B, I]
    stacked    logits = W MLP(cross(x)) + b                               the MLP reads the crosses
    parallel   logits = W [cross(x), MLP(x)] + b                          both read the features

Legend of the shapes in names: B samples, I elements of the input, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.models.tables import Bags, input_width, model_input, prefetched
from tilerec.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet
from tilerec.modules.mlp import MLP
from tilerec.modules.utils import check_size
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class DCNv2(nn.Module):
    """Deep and cross network, version 2: explicit crosses of bounded degree beside, or below, an MLP (2008.13535).

    Args:
        embedding_bag_collection: tables of any dims; None without sparse features.
        dense_in_features: number of dense features; 0 for none.
        cross_num_layers: L; the crosses have degrees up to L + 1. 0 for no crosses.
        deep_layer_sizes: of the MLP; () for no MLP, so that the crosses alone give the logits.
        cross_low_rank_dim: rank of the crosses' matrices; 0 for full matrices [I, I].
        cross_num_experts: low-rank crosses per layer, weighed by a gate; 1 for no gate. Needs a rank.
        structure: see the head of this file.
        num_tasks: T.
        dense_device: of all weights but the tables'.

    Shape: dense `[B, dense_in_features]` and a `KeyedJaggedTensor` of B samples to logits `[B, T]`.

    State: `embedding_bag_collection.*`, `crossnet.*` (see `tilerec.modules.crossnet`), `deep_arch._mlp.*`,
    `over_arch.weight`, `over_arch.bias`.

    Raises:
        ConfigError: no features, a size that is too small, or experts without a rank.

    With one dense feature x = 3, one full cross layer with weight 2 and bias 1, no MLP and an output layer of weight
    1 and bias 0, the logit is 3 (2 * 3 + 1) + 3 = 24.
    """

    def __init__(
        self,
        embedding_bag_collection: Bags | None,
        dense_in_features: int,
        cross_num_layers: int,
        deep_layer_sizes: Sequence[int],
        *,
        cross_low_rank_dim: int = 0,
        cross_num_experts: int = 1,
        structure: Literal["stacked", "parallel"] = "stacked",
        num_tasks: int = 1,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if structure not in ("stacked", "parallel"):
            raise ConfigError(
                f"DCNv2: structure: got {structure!r}; expected 'stacked' or 'parallel'. Use one of them."
            )
        width = input_width("DCNv2", embedding_bag_collection, dense_in_features)
        check_size("DCNv2: num_tasks", num_tasks)
        self._dense_in_features = dense_in_features
        self._parallel = structure == "parallel" and bool(deep_layer_sizes)
        self.embedding_bag_collection = embedding_bag_collection
        self.crossnet = _crosses(width, cross_num_layers, cross_low_rank_dim, cross_num_experts, dense_device)
        self.deep_arch = MLP(width, deep_layer_sizes, device=dense_device)
        deep_width = deep_layer_sizes[-1] if deep_layer_sizes else width
        self.over_arch = nn.Linear(deep_width + width * self._parallel, num_tasks, device=dense_device)

    def prefetch(self, sparse_features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Prefetch a later batch (`prefetch` of the tables); call the model with the returned features."""
        return prefetched(self.embedding_bag_collection, sparse_features)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits [B, T].

        Args:
            dense_features: [B, dense_in_features].
            sparse_features: B samples of every feature that the tables read.
        """
        x_BI = model_input(
            "DCNv2", self.embedding_bag_collection, dense_features, sparse_features, self._dense_in_features
        )
        crosses_BI = self.crossnet(x_BI)
        if self._parallel:
            last = torch.cat([crosses_BI, self.deep_arch(x_BI)], dim=1)
        else:
            last = self.deep_arch(crosses_BI)
        logits: Tensor = self.over_arch(last)
        return logits


def _crosses(width: int, layers: int, rank: int, experts: int, device: torch.device | None) -> nn.Module:
    check_size("DCNv2: cross_low_rank_dim", rank, least=0)
    check_size("DCNv2: cross_num_experts", experts)
    if experts > 1 and not rank:
        raise ConfigError(
            f"DCNv2: got cross_num_experts={experts} with full matrices; expected a cross_low_rank_dim of at least 1, "
            "because experts are low-rank crosses. Set the rank."
        )
    if experts > 1:
        return LowRankMixtureCrossNet(width, layers, experts, rank, device=device)
    if rank:
        return LowRankCrossNet(width, layers, rank, device=device)
    return CrossNet(width, layers, device=device)
