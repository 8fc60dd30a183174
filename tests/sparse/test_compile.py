"""Sparse tensors as arguments and results of compiled and exported programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.utils._pytree as pytree
from torch import nn
from torch.export import Dim

from tilerec.ops.jagged import segment_sum
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor


def _batch(stride: int, seed: int, by_offsets: bool = False, synced: bool = True) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    # No feature of 0 or 1 ids: torch specialises on those two sizes, whoever's tensors they are.
    lengths = torch.randint(1, 4, (3 * stride,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    kjt = KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.randint(0, 99, (int(offsets[-1]),), generator=generator),
        torch.rand(int(offsets[-1]), generator=generator),
        None if by_offsets else lengths,
        offsets if by_offsets else None,
    )
    return kjt.sync() if synced else kjt


def _blocks(kjt: KeyedJaggedTensor) -> KeyedTensor:
    return KeyedTensor(["x", "y"], [1, 2], kjt.lengths().view(3, -1).T.float())


PROGRAMS: dict[str, Callable[[KeyedJaggedTensor], Any]] = {
    "read": lambda kjt: (kjt.values() * kjt.stride(), kjt.lengths() + 1, kjt.offsets() * len(kjt.keys())),
    "one feature": lambda kjt: (kjt["b"].values() + 1, kjt["c"].offsets(), kjt["c"].to_padded_dense(4)),
    "every feature": lambda kjt: {key: jagged.weights() * 2 for key, jagged in kjt.to_dict().items()},
    "permute": lambda kjt: kjt.permute([2, 0]),
    "split": lambda kjt: kjt.split([1, 2]),
    "build": lambda kjt: KeyedJaggedTensor(["x", "y", "z"], kjt.values(), lengths=kjt.lengths()).offsets(),
    "join": lambda kjt: KeyedJaggedTensor.concat(kjt.split([2, 1])).lengths() + 1,
    "regroup": lambda kjt: (_blocks(kjt), KeyedTensor.regroup([_blocks(kjt)], [["y", "x"], ["x"]])),
}
UNSYNCED = ("read", "build", "regroup")


def _assert_equal(one: Any, other: Any) -> None:
    leaves, spec = pytree.tree_flatten(one)
    other_leaves, other_spec = pytree.tree_flatten(other)
    assert spec == other_spec
    for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
        assert torch.equal(leaf, other_leaf)


@pytest.mark.parametrize("by_offsets", [False, True])
@pytest.mark.parametrize(
    ("name", "synced"), [*[(name, True) for name in PROGRAMS], *[(name, False) for name in UNSYNCED]]
)
def test_one_graph_serves_every_batch_whatever_it_remembers(
    name: str, synced: bool, by_offsets: bool
) -> None:
    program = PROGRAMS[name]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=counter)
    for seed, stride in enumerate((4, 7, 5, 3)):
        kjt = _batch(stride, seed, by_offsets, synced)
        expected = program(_batch(stride, seed, by_offsets, synced))
        _assert_equal(compiled(kjt), expected)
        kjt.lengths()
        kjt.offsets()
        if synced:
            kjt.to_dict()
        _assert_equal(compiled(kjt), expected)
    assert counter.frame_count == 1


def test_one_graph_slices_unsynced_batches_with_empty_features() -> None:
    def program(kjt: KeyedJaggedTensor) -> list[torch.Tensor]:
        return [jagged.values() + 1 for jagged in [kjt["b"], *kjt.to_dict().values()]]

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=counter)
        for lengths in (
            [2, 3, 1, 0, 5, 2],
            [0, 0, 1, 0, 0, 0, 2, 3, 4],
            [0, 0, 0, 0, 2, 2],
            [1, 2, 3, 4, 5, 6],
        ):
            kjt = KeyedJaggedTensor(
                ["a", "b", "c"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths)
            )
            _assert_equal(compiled(kjt), program(kjt))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["read", "one feature", "permute"])
def test_one_graph_serves_variable_batches(name: str) -> None:
    programs: dict[str, Callable[[KeyedJaggedTensor], Any]] = {
        "read": lambda kjt: (kjt.values() + kjt.stride(), kjt.offsets() * 2),
        "one feature": lambda kjt: (kjt["b"].values() + 1, kjt["b"].lengths() + 1),
        "permute": lambda kjt: kjt.permute([1, 0]).lengths() + 1,
    }
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(programs[name], fullgraph=True, dynamic=True, backend=counter)
    for seed, counts in enumerate(([[3, 4], [5, 2]], [[6, 2], [3, 7]], [[5, 3], [9, 4]])):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 4, (sum(map(sum, counts)),), generator=generator)
        values = torch.arange(int(lengths.sum()))
        kjt = KeyedJaggedTensor(["a", "b"], values, lengths=lengths, stride_per_key_per_rank=counts).sync()
        _assert_equal(compiled(kjt), programs[name](kjt))
    assert counter.frame_count == 1


def test_other_keys_are_another_graph() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda kjt: kjt["b"].values() + 1, fullgraph=True, dynamic=True, backend=counter)
    kjt = _batch(4, 0)
    for order in ([0, 1, 2], [2, 1, 0], [0, 1, 2], [2, 1, 0]):
        permuted = kjt.permute(order)
        assert torch.equal(compiled(permuted), kjt["b"].values() + 1)
    assert counter.frame_count == 2


def test_gradients_of_weights_flow_through_a_compiled_permutation() -> None:
    torch._dynamo.reset()
    kjt = _batch(5, 1)
    gradients = []
    for run in (
        torch.compile(_second_feature, fullgraph=True, dynamic=True, backend="aot_eager"),
        _second_feature,
    ):
        weights = kjt.weights().clone().requires_grad_()
        run(KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, kjt.lengths()).sync()).backward()
        gradients.append(weights.grad)
    assert gradients[0] is not None
    assert torch.equal(*gradients)


def _second_feature(kjt: KeyedJaggedTensor) -> torch.Tensor:
    return (kjt.permute([1, 0, 2])["b"].weights() ** 2).sum()


class _Count(nn.Module):
    """Sum of the weights by sample and feature."""

    def forward(self, kjt: KeyedJaggedTensor) -> KeyedTensor:
        sums = segment_sum(kjt.weights(), kjt.offsets()).view(len(kjt.keys()), kjt.stride())
        return KeyedTensor(kjt.keys(), [1] * len(kjt.keys()), sums.T)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_any_batch_after_a_save_and_a_load(strict: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    module, path = _Count(), tmp_path / "count.pt2"
    exported = torch.export.export(
        module,
        (_batch(5, 0),),
        dynamic_shapes=([{0: Dim.AUTO}, {0: Dim.AUTO}, {0: Dim.AUTO}],),
        strict=strict,
    )
    torch.export.save(exported, path)
    loaded = torch.export.load(path).module()
    for stride in (3, 9):
        kjt = _batch(stride, stride, synced=False)
        _assert_equal(loaded(kjt), module(kjt))
