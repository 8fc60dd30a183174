"""TorchRec's towers: tables with the dense modules that read them, and several of these side by side.

Towers are plain modules here: sharding cuts their tables like all others, and the interaction runs on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.compat.modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from tilerec.errors import ConfigError, InputError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def tower_input_params(module: nn.Module) -> tuple[bool, bool]:
    """Return whether a module takes features without, and with weights. A module of another kind takes both."""
    if isinstance(module, EmbeddingCollectionInterface):
        return True, False
    if isinstance(module, EmbeddingBagCollectionInterface):
        return not module.is_weighted(), module.is_weighted()
    return True, True


class EmbeddingTower(nn.Module):
    """Tables, and the module that reads their embeddings.

    Args:
        embedding_module: such as an `EmbeddingBagCollection`.
        interaction_module: takes the output of `embedding_module`; returns [B, N].
        device: accepted without effect; both modules have a device.
    """

    def __init__(
        self, embedding_module: nn.Module, interaction_module: nn.Module, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.embedding = embedding_module
        self.interaction = interaction_module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the interaction of the embeddings, [B, N]."""
        found: Tensor = self.interaction(self.embedding(*args, **kwargs))
        return found


class EmbeddingTowerCollection(nn.Module):
    """Towers whose outputs are joined.

    Args:
        towers: at least one.
        device: accepted without effect.
    """

    def __init__(self, towers: Sequence[EmbeddingTower], device: torch.device | None = None) -> None:
        super().__init__()
        if not towers:
            raise ConfigError("EmbeddingTowerCollection: got no towers; expected at least one. Pass a list of them.")
        self.towers = nn.ModuleList(towers)
        self._takes = [tower_input_params(tower.embedding) for tower in towers]

    def forward(
        self, features: KeyedJaggedTensor | None = None, weighted_features: KeyedJaggedTensor | None = None
    ) -> Tensor:
        """Return the outputs of all towers side by side, [B, N of all].

        Args:
            features, weighted_features: features without and with weights of ids; each is needed if a tower takes it.

        Raises:
            InputError: a tower takes features that are not given.
        """
        outputs = []
        for index, (tower, takes) in enumerate(zip(self.towers, self._takes, strict=True)):
            given = (("features", features), ("weighted_features", weighted_features))
            taken = [pair for pair, wanted in zip(given, takes, strict=True) if wanted]
            for name, batch in taken:
                if batch is None:
                    raise InputError(
                        f"EmbeddingTowerCollection: got {name}=None; expected the features of tower {index}. Pass them."
                    )
            outputs.append(tower(*(batch for _, batch in taken)))
        return torch.cat(outputs, dim=1)
