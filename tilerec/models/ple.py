"""Progressive layered extraction (Tang et al., RecSys 2020): experts of each task beside shared ones, in levels.

    x_t = x_s = [pooled vectors of all features, dense features]           inputs of the first level
    level    x_t' = sum over own and shared experts e of softmax(W_t x_t)_e  e(its input)       for each task t
             x_s' = sum over all experts e of softmax(W_s x_s)_e  e(its input)                   not in the last level
    logit_t = tower_t(x_t of the last level)

Experts of a task read x_t, shared ones x_s. Gradients of a task reach no other task's experts of the last level, so
tasks that disagree disturb each other less than in `MMoE`. One level is the paper's CGC.

Legend of the shapes in names: B samples, I elements of a level's input, E experts, H elements of their output, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.models.tables import Bags, input_width, model_input, prefetched
from tilerec.models.task_towers import TaskTowers
from tilerec.modules.mlp import MLP
from tilerec.modules.utils import check_size
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


class ExtractionLevel(nn.Module):
    """One level of `PLE`: experts of each task, shared experts, and gates.

    Args:
        in_features: I.
        layer_sizes: of each expert's MLP, at least one; the last one is H.
        num_task_experts: experts of each task.
        num_shared_experts: experts of all tasks.
        num_tasks: T.
        is_last: whether no level follows, so that there is no shared output.
        device: of the weights.

    Shape: T + 1 tensors `[B, I]`, those of the tasks and the shared one, to T + 1 tensors `[B, H]`, or T if it is the
    last level.

    State: `task_experts.<task>.<expert>._mlp.*`, `shared_experts.<expert>._mlp.*`, `gates.<task>.weight`; the shared
    gate is number T.
    """

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        num_task_experts: int,
        num_shared_experts: int,
        num_tasks: int,
        *,
        is_last: bool,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()

        def experts(count: int) -> nn.ModuleList:
            return nn.ModuleList(MLP(in_features, layer_sizes, device=device) for _ in range(count))

        self.task_experts = nn.ModuleList(experts(num_task_experts) for _ in range(num_tasks))
        self.shared_experts = experts(num_shared_experts)
        read = [num_task_experts + num_shared_experts] * num_tasks
        if not is_last:
            read.append(num_tasks * num_task_experts + num_shared_experts)
        self.gates = nn.ModuleList(nn.Linear(in_features, count, bias=False, device=device) for count in read)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        *task_inputs, shared_BI = inputs
        shared = [expert(shared_BI) for expert in self.shared_experts]
        own: list[list[Tensor]] = []
        for experts, input_BI in zip(self.task_experts, task_inputs, strict=True):
            assert isinstance(experts, nn.ModuleList)
            own.append([expert(input_BI) for expert in experts])
        mixtures = [[*outputs, *shared] for outputs in own]
        mixtures.append([output for outputs in own for output in outputs] + shared)
        return [
            torch.einsum("be,beh->bh", gate(input_BI).softmax(dim=1), torch.stack(outputs, dim=1))
            for gate, input_BI, outputs in zip(self.gates, inputs, mixtures, strict=False)
        ]


class PLE(nn.Module):
    """Multi-task model with experts of each task and shared experts, in levels.

    Args:
        embedding_bag_collection: tables of any dims; None without sparse features.
        dense_in_features: number of dense features; 0 for none.
        num_levels: levels; 1 is the paper's CGC.
        num_task_experts: experts of each task and level.
        num_shared_experts: shared experts of each level.
        expert_layer_sizes: of each expert's MLP, at least one.
        tower_layer_sizes: of each task's MLP, without the last layer, which has one output.
        num_tasks: T.
        dense_device: of all weights but the tables'.

    Shape: dense `[B, dense_in_features]` and a `KeyedJaggedTensor` of B samples to logits `[B, T]`.

    State: `embedding_bag_collection.*`, `levels.<level>.*` (see `ExtractionLevel`), `task_towers.towers.<task>.*`.

    Raises:
        ConfigError: no features, a size below 1, or experts without layers.
    """

    def __init__(
        self,
        embedding_bag_collection: Bags | None,
        dense_in_features: int,
        num_levels: int,
        num_task_experts: int,
        num_shared_experts: int,
        expert_layer_sizes: Sequence[int],
        tower_layer_sizes: Sequence[int],
        num_tasks: int,
        *,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        width = input_width("PLE", embedding_bag_collection, dense_in_features)
        for name, count in (
            ("num_levels", num_levels),
            ("num_task_experts", num_task_experts),
            ("num_shared_experts", num_shared_experts),
            ("num_tasks", num_tasks),
        ):
            check_size(f"PLE: {name}", count)
        if not expert_layer_sizes:
            raise ConfigError(
                "PLE: got expert_layer_sizes=[]; expected at least one layer, because experts without layers are "
                "equal. Name the size of a layer."
            )
        hidden = expert_layer_sizes[-1]
        self._dense_in_features, self._num_tasks = dense_in_features, num_tasks
        self.embedding_bag_collection = embedding_bag_collection
        self.levels = nn.ModuleList(
            ExtractionLevel(
                hidden if level else width,
                expert_layer_sizes,
                num_task_experts,
                num_shared_experts,
                num_tasks,
                is_last=level == num_levels - 1,
                device=dense_device,
            )
            for level in range(num_levels)
        )
        self.task_towers = TaskTowers(hidden, tower_layer_sizes, num_tasks, device=dense_device)

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
            "PLE", self.embedding_bag_collection, dense_features, sparse_features, self._dense_in_features
        )
        inputs = [x_BI] * (self._num_tasks + 1)
        for level in self.levels:
            inputs = level(inputs)
        logits: Tensor = self.task_towers(inputs)
        return logits
