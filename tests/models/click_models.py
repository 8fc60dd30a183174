"""Click models of any features as data for tests: how each is built, and its logits in plain torch.

An oracle gets the state dict (leaves that may need gradients), the concatenated input [B, I] and the number of tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilerec.models.dcn import DCNv2
from tilerec.models.linear import LogisticRegression
from tilerec.models.mmoe import MMoE
from tilerec.models.ple import PLE
from tilerec.models.shared_bottom import SharedBottom
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig

State = dict[str, Tensor]
Make = Callable[[EmbeddingBagCollection | None, int, int], nn.Module]
Oracle = Callable[[State, Tensor, int], Tensor]

ROWS = 20


@dataclass(frozen=True)
class Features:
    """Features of a model: dims of its tables by name, each with the features that read it, and dense features."""

    tables: tuple[tuple[str, int, str, tuple[str, ...]], ...]  # name, dim, pooling, features
    dense: int

    def bags(self, device: str | None = None, dim: int = 0) -> EmbeddingBagCollection | None:
        """Return the tables; with `dim`, all of that dim."""
        configs = [
            EmbeddingBagConfig(ROWS, dim or own, name, feature_names=list(names), pooling=pooling)
            for name, own, pooling, names in self.tables
        ]
        return EmbeddingBagCollection(configs, device=device) if configs else None

    def batch(self, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, KeyedJaggedTensor]:
        """Return dense features and ids, with empty bags and repeated ids."""
        draw = torch.Generator().manual_seed(seed)
        keys = sorted({name for table in self.tables for name in table[3]}) or ["unread"]
        lengths = torch.randint(0, 4, (len(keys) * size,), generator=draw)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
        dense = torch.randn(size, self.dense, dtype=dtype, generator=draw)
        return dense, KeyedJaggedTensor.from_lengths_sync(keys, ids, lengths)

    def input(self, state: State, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return the pooled vectors, table by table, and the dense features, sample by sample in plain torch."""
        rows = []
        for sample in range(dense.shape[0]):
            parts = []
            for table, _, pooling, names in self.tables:
                weight = state[f"embedding_bag_collection.embedding_bags.{table}.weight"]
                for name in names:
                    found = weight[sparse[name].to_dense()[sample]]
                    total = found.sum(0)
                    parts.append(total / max(len(found), 1) if pooling == "mean" else total)
            rows.append(torch.cat([*parts, dense[sample]]))
        width = sum(dim * len(names) for _, dim, _, names in self.tables) + self.dense
        return torch.stack(rows) if rows else dense.new_zeros(0, width)


BOTH = Features((("t1", 3, "sum", ("b",)), ("t2", 2, "mean", ("a", "b"))), 4)
ONE_DENSE = Features((), 1)
ONE_SPARSE = Features((("t1", 3, "sum", ("a",)),), 0)


def mlp(state: State, name: str, x: Tensor) -> Tensor:
    """max(0, W x + b), layer after layer."""
    layer = 0
    while f"{name}._mlp.{layer}._linear.weight" in state:
        linear = f"{name}._mlp.{layer}._linear"
        x = (x @ state[f"{linear}.weight"].T + state[f"{linear}.bias"]).clamp(min=0)
        layer += 1
    return x


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def towers(state: State, inputs: list[Tensor]) -> Tensor:
    logits = []
    for task, x in enumerate(inputs):
        name = f"task_towers.towers.{task}"
        logits.append(linear(state, f"{name}.1", mlp(state, f"{name}.0", x)))
    return torch.cat(logits, dim=1)


def full_crosses(state: State, x_0: Tensor) -> Tensor:
    x = x_0
    for layer in range(2):
        w, b = state[f"crossnet.kernels.{layer}"], state[f"crossnet.bias.{layer}"]
        x = x_0 * (x @ w.T + b[:, 0]) + x
    return x


def low_rank_crosses(state: State, x_0: Tensor) -> Tensor:
    x = x_0
    for layer in range(2):
        w, v, b = (state[f"crossnet.{name}.{layer}"] for name in ("W_kernels", "V_kernels", "bias"))
        x = x_0 * ((x @ v.T) @ w.T + b) + x
    return x


def mixed_crosses(state: State, x_0: Tensor) -> Tensor:
    x = x_0
    for layer in range(2):
        u, v, c, b = (state[f"crossnet.{name}.{layer}"] for name in ("U_kernels", "V_kernels", "C_kernels", "bias"))
        gates = torch.softmax(torch.cat([x @ state[f"crossnet.gates.{e}.weight"].T for e in range(3)], 1), 1)
        total = torch.zeros_like(x)
        for e in range(3):
            inner = ((x @ v[e].T).clamp(min=0) @ c[e].T).clamp(min=0)
            total = total + gates[:, e : e + 1] * (x_0 * (inner @ u[e].T + b[:, 0]))
        x = total + x
    return x


def stacked(crosses: Callable[[State, Tensor], Tensor]) -> Oracle:
    return lambda state, x, _: linear(state, "over_arch", mlp(state, "deep_arch", crosses(state, x)))


def parallel(state: State, x: Tensor, _: int) -> Tensor:
    both = torch.cat([low_rank_crosses(state, x), mlp(state, "deep_arch", x)], dim=1)
    return linear(state, "over_arch", both)


def shared_bottom(state: State, x: Tensor, tasks: int) -> Tensor:
    return towers(state, [mlp(state, "bottom", x)] * tasks)


def mixture(gate: Tensor, x: Tensor, experts: list[Tensor]) -> Tensor:
    weights = torch.softmax(x @ gate.T, dim=1)
    total = torch.zeros_like(experts[0])
    for number, expert in enumerate(experts):
        total = total + weights[:, number : number + 1] * expert
    return total


def mmoe(state: State, x: Tensor, tasks: int) -> Tensor:
    experts = [mlp(state, f"experts.{e}", x) for e in range(3)]
    return towers(state, [mixture(state[f"gates.{task}.weight"], x, experts) for task in range(tasks)])


def ple(state: State, x: Tensor, tasks: int) -> Tensor:
    inputs, shared_input = [x] * tasks, x
    for level in (0, 1):
        at = f"levels.{level}"
        shared = [mlp(state, f"{at}.shared_experts.{e}", shared_input) for e in range(2)]
        own = [[mlp(state, f"{at}.task_experts.{t}.0", inputs[t])] for t in range(tasks)]
        new = [mixture(state[f"{at}.gates.{t}.weight"], inputs[t], [*own[t], *shared]) for t in range(tasks)]
        if level == 0:
            every = [one for experts in own for one in experts] + shared
            shared_input = mixture(state[f"{at}.gates.{tasks}.weight"], shared_input, every)
        inputs = new
    return towers(state, inputs)


MODELS: dict[str, tuple[Make, Oracle]] = {
    "dcn, stacked": (
        lambda bags, dense, tasks: DCNv2(bags, dense, 2, [5, 4], num_tasks=tasks),
        stacked(full_crosses),
    ),
    "dcn, low rank, parallel": (
        lambda bags, dense, tasks: DCNv2(
            bags, dense, 2, [5], cross_low_rank_dim=2, structure="parallel", num_tasks=tasks
        ),
        parallel,
    ),
    "dcn, mixture, crosses alone": (
        lambda bags, dense, tasks: DCNv2(
            bags, dense, 2, [], cross_low_rank_dim=2, cross_num_experts=3, structure="parallel", num_tasks=tasks
        ),
        stacked(mixed_crosses),
    ),
    "shared bottom": (lambda bags, dense, tasks: SharedBottom(bags, dense, [6], [4], tasks), shared_bottom),
    "shared tables": (lambda bags, dense, tasks: SharedBottom(bags, dense, [], [], tasks), shared_bottom),
    "mmoe": (lambda bags, dense, tasks: MMoE(bags, dense, 3, [6, 5], [4], tasks), mmoe),
    "ple": (lambda bags, dense, tasks: PLE(bags, dense, 2, 1, 2, [6], [4], tasks), ple),
}


def logistic(bags: EmbeddingBagCollection | None, dense: int, tasks: int) -> nn.Module:
    return LogisticRegression(bags, dense, num_tasks=tasks)
