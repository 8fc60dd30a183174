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

from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.jagged.definition import segment_sum
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.table import EmbeddingBagConfig


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
def test_one_graph_serves_every_batch_whatever_it_remembers(name: str, synced: bool, by_offsets: bool) -> None:
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
            kjt = KeyedJaggedTensor(["a", "b", "c"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths))
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


def _bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(9, 4, "ab", feature_names=["a", "b"]),
            EmbeddingBagConfig(8, 3, "c", feature_names=["c"]),
        ]
    )


def _ids(stride: int, seed: int, table: bool) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths_FB = torch.randint(0, 4, (3, stride), generator=generator)
    ids = torch.randint(0, 8, (int(lengths_FB.sum()),), generator=generator)
    return KeyedJaggedTensor(["a", "b", "c"], ids, lengths=lengths_FB if table else lengths_FB.view(-1))


class _Joined(nn.Module):
    """Bags beside dense features: the batch size of the one must be known to be that of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = _bags()

    def forward(self, dense_BD: torch.Tensor, kjt: KeyedJaggedTensor) -> torch.Tensor:
        pooled_BD = self.bags(kjt).values()
        assert pooled_BD.shape[0] == dense_BD.shape[0] == kjt.stride()
        return torch.cat([dense_BD, pooled_BD], dim=1).relu()


def _saved_and_loaded(program: torch.export.ExportedProgram, path: Path) -> nn.Module:
    torch.export.save(program, path)
    return torch.export.load(path).module()


@pytest.mark.parametrize(
    ("table", "dim", "strict"),
    [(table, Dim.DYNAMIC, strict) for table in (False, True) for strict in (False, True)] + [(False, Dim.AUTO, False)],
)
def test_an_exported_program_takes_every_batch_size(table: bool, dim: Any, strict: bool, tmp_path: Path) -> None:
    """The batch size is dimension 1 of a table of lengths; from S = F * B torch would not learn that it may be 1."""
    torch._dynamo.reset()
    module = _Joined().eval()
    program = torch.export.export(
        module,
        (torch.rand(4, 5), _ids(4, 0, table)),
        dynamic_shapes=({0: dim}, [{0: dim}, {int(table): dim}]),
        strict=strict,
    )
    loaded = _saved_and_loaded(program, tmp_path / "joined.pt2")
    for stride in (1, 2, 5, 0):
        dense_BD, kjt = torch.rand(stride, 5), _ids(stride, stride, table)
        assert torch.equal(loaded(dense_BD, kjt), module(dense_BD, kjt))
    with pytest.raises((RuntimeError, AssertionError)):
        loaded(torch.rand(2, 5), _ids(3, 0, table))


class _Sizes(nn.Module):
    """All that depends on a batch size: slices, permutations, offsets by key, and empty tensors."""

    def forward(self, kjt: KeyedJaggedTensor) -> list[torch.Tensor]:
        return [
            *(jagged.values() + 1 for jagged in kjt.to_dict().values()),
            kjt["b"].lengths() + 1,
            kjt.permute([2, 0])["a"].lengths() + 1,
            kjt.values().new_zeros(kjt.stride()),
        ]


def _with_offsets(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), offsets=kjt.offsets())


@pytest.mark.parametrize(
    ("form", "strict"), [("table", False), ("lengths", False), ("lengths", True), ("offsets", False)]
)
def test_slices_by_key_export_for_every_batch_size(form: str, strict: bool, tmp_path: Path) -> None:
    def batch(stride: int) -> KeyedJaggedTensor:
        own = _ids(stride, stride, table=form == "table")
        return _with_offsets(own) if form == "offsets" else own

    torch._dynamo.reset()
    shapes = ([{0: Dim.DYNAMIC}, {int(form == "table"): Dim.DYNAMIC}],)
    program = torch.export.export(_Sizes(), (batch(4),), dynamic_shapes=shapes, strict=strict)
    loaded = _saved_and_loaded(program, tmp_path / "sizes.pt2")
    # Lengths are differences of offsets, of which torch takes two for granted.
    for stride in (1, 2, 5) if form == "offsets" else (1, 2, 5, 0):
        _assert_equal(loaded(batch(stride)), _Sizes()(batch(stride)))


def test_named_and_derived_dimensions_may_begin_at_zero() -> None:
    samples, bags = Dim("samples", min=0), Dim("bags", min=0)
    for lengths in (3 * samples, bags):
        shapes = ({0: samples}, [{0: Dim("ids", min=0)}, {0: lengths}])
        program = torch.export.export(
            _Joined().eval(), (torch.rand(4, 5), _ids(4, 0, table=False)), dynamic_shapes=shapes
        )
        assert program.module()(torch.rand(1, 5), _ids(1, 0, table=False)).shape[0] == 1


def test_a_program_that_depends_on_the_batch_size_refuses_other_ones() -> None:
    class Branch(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
            return kjt.values() * 2 if kjt.stride() > 1 else kjt.values()

    program = torch.export.export(
        Branch(), (_ids(4, 0, table=False),), dynamic_shapes=([{0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}],)
    ).module()
    kjt = _ids(7, 7, table=False)
    assert torch.equal(program(kjt), kjt.values() * 2)
    with pytest.raises(RuntimeError, match="assertion failed"):
        program(_ids(1, 0, table=False))


def test_one_graph_serves_every_table_of_lengths() -> None:
    def program(kjt: KeyedJaggedTensor) -> Any:
        return kjt.lengths() + 1, kjt.offsets() * kjt.stride(), kjt.permute([1, 2, 0]).lengths() + 1

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=counter)
    for stride in (4, 7, 3):
        kjt = _ids(stride, stride, table=True)
        for _ in range(2):
            _assert_equal(compiled(kjt), program(kjt))
            kjt.lengths()
            kjt.offsets()
    assert counter.frame_count == 1


def test_repeated_features_and_checked_parts_are_traced() -> None:
    def program(kjt: KeyedJaggedTensor) -> Any:
        twice = kjt.permute([1, 0, 1])
        again = KeyedJaggedTensor(kjt.keys(), kjt.values(), kjt.weights() * 2, kjt.lengths())
        return twice.lengths() + 1, twice["b"].weights() * 2, again.weights() + 1

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=counter)
    for seed, stride in enumerate((4, 7, 5)):
        kjt = _batch(stride, seed)
        _assert_equal(compiled(kjt), program(kjt))
    assert counter.frame_count == 1


def test_one_graph_serves_variable_batches_of_one_key() -> None:
    def program(kjt: KeyedJaggedTensor) -> Any:
        rebuilt = KeyedJaggedTensor(
            kjt.keys(),
            kjt.values(),
            lengths=kjt.lengths(),
            stride_per_key_per_rank=kjt.stride_per_key_per_rank(),
            inverse_indices=kjt.inverse_indices(),
        )
        return kjt["a"].values() + kjt.stride(), kjt.permute([0]).lengths() + 1, rebuilt.offsets() + 1

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend=counter)
    for bags, samples in ((3, 5), (4, 7), (6, 4)):
        kjt = KeyedJaggedTensor(
            ["a"],
            torch.arange(2 * bags),
            lengths=torch.full((bags,), 2),
            stride_per_key_per_rank=[[bags]],
            inverse_indices=(["a"], torch.arange(samples).view(1, -1) % bags),
        ).sync()
        _assert_equal(compiled(kjt), program(kjt))
    assert counter.frame_count == 1


def test_weights_of_a_size_that_is_read_from_data_are_taken() -> None:
    def program(kjt: KeyedJaggedTensor) -> torch.Tensor:
        chosen = kjt.values() > 50
        kept = JaggedTensor(kjt.values()[chosen], kjt.weights()[chosen], kjt.lengths())
        return kept.values() + 1

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="eager")
        kjt = _batch(5, 3)
        assert torch.equal(compiled(kjt), program(kjt))
