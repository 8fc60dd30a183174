"""Embedding collections for any ids: values, rows that change hands, capacity, state."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.evict import LFU_EvictionPolicy
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tilerec.modules.mch import MCHManagedCollisionModule
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adam, OptimizerSpec, RowWiseAdagrad
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig

LRU = {"eviction_policy_name": "LRU_EVICTION"}


def pooled(
    rows: int = 12, buckets: int = 2, optimizer: OptimizerSpec | None = None, remapped: bool = True, *,
    dim: int = 4, data_type: DataType = DataType.FP32, init_fn: Any = None, **options: Any,
) -> ManagedCollisionEmbeddingBagCollection:  # fmt: skip
    torch.manual_seed(3)
    configs = [
        EmbeddingBagConfig(rows, dim, "t", data_type, ["a", "b"], init_fn=init_fn),
        EmbeddingBagConfig(9, 3, "plain", feature_names=["p"]),
    ]
    module = HashZchManagedCollisionModule(rows, "cpu", buckets, **(options or LRU))
    made = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(configs), ManagedCollisionCollection({"t": module}, configs), remapped
    )
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, made.parameters())
    return made


def features(ids: list[int], other: list[int] | None = None) -> KeyedJaggedTensor:
    """One sample: `ids` of feature a, `other` of b, and id 1 of p."""
    others = other or []
    return KeyedJaggedTensor.from_lengths_sync(
        ["a", "b", "p"], torch.tensor([*ids, *others, 1]), torch.tensor([len(ids), len(others), 1])
    )


def weight_of(module: Any) -> Tensor:
    return module.embedding_module.embedding_bags["t"].weight.detach()


def step(module: Any, ids: list[int], other: list[int] | None = None) -> KeyedJaggedTensor:
    out, remapped = module(features(ids, other))
    out.values().sum().backward()
    return remapped


def test_outputs_are_those_of_the_rows_that_the_ids_have() -> None:
    module = pooled()
    batch = features([5, -1, 2**62], [5])
    out, remapped = module(batch)
    assert torch.equal(out["a"], weight_of(module)[remapped["a"].values()].sum(0, keepdim=True))
    assert torch.equal(out["b"][0], weight_of(module)[remapped["a"].values()[0]])
    assert torch.equal(module.embedding_module(remapped).values(), out.values())
    assert pooled(remapped=False)(batch)[1] is None
    assert [name for name, _ in module.named_parameters()] == [
        "_embedding_module.embedding_bags.t.weight",
        "_embedding_module.embedding_bags.plain.weight",
    ]


def test_a_sequence_collection_has_a_row_for_each_id() -> None:
    configs = [EmbeddingConfig(12, 4, "t", feature_names=["a"])]
    mcc = ManagedCollisionCollection({"t": HashZchManagedCollisionModule(12, "cpu", 2)}, configs)
    module = ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs), mcc, return_remapped_features=True)
    batch = KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([7, 7, -9]), torch.tensor([2, 0, 1]))
    out, remapped = module(batch)
    assert remapped is not None
    table = module.embedding_module._tables["t"].weight.detach()
    assert torch.equal(out["a"].values(), table[remapped.values()])
    assert out["a"].lengths().tolist() == [2, 0, 1]
    assert remapped.values()[0] == remapped.values()[1]


def test_distinct_ids_are_trained_apart_while_there_are_rows() -> None:
    """The same as a table that is indexed densely, for ids of 64 bits."""
    module = pooled(600, 2, SGD(lr=0.5))
    start = weight_of(module).clone()
    ids = [-1, 10**15, -(2**63)]
    rows = step(module, ids)["a"].values()
    assert rows.unique().numel() == 3
    moved = (weight_of(module) != start).any(1).nonzero().flatten().tolist()
    assert sorted(rows.tolist()) == moved
    assert torch.allclose(weight_of(module)[rows], start[rows] - 0.5)


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), Adam(lr=0.1, row_step=True), SGD(lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.BF16])
def test_a_row_that_changes_hands_begins_anew_with_its_optimizer_state(
    optimizer: OptimizerSpec, data_type: DataType
) -> None:
    module = pooled(3, 1, optimizer, data_type=data_type, dim=5, disable_fallback=True, **LRU)
    start = weight_of(module).clone()
    table = module.embedding_module._tables["t"]
    fresh = {slot.name: table.rows.state[slot.name].clone() for slot in optimizer.slots}
    rows = dict(zip([10, 11, 12], step(module, [10, 11, 12])["a"].values().tolist(), strict=True))
    step(module, [11, 12])
    step(module, [11, 12])
    with torch.no_grad():
        out, remapped = module(features([13]))  # takes the row of 10
    row = rows[10]
    assert remapped["a"].values().tolist() == [row]
    assert torch.equal(weight_of(module)[row], start[row])
    assert torch.equal(out["a"][0], start[row].to(out.values().dtype))
    for name, value in fresh.items():
        assert torch.equal(table.rows.state[name][row], value[row]), name
        assert not torch.equal(table.rows.state[name][rows[11]], value[rows[11]]), name
    assert not torch.equal(weight_of(module)[rows[11]], start[rows[11]])


def test_a_row_with_a_users_init_fn_begins_with_a_draw_of_its_own() -> None:
    module = pooled(3, 1, SGD(lr=1.0), init_fn=lambda rows: torch.rand_like(rows) + 5, disable_fallback=True, **LRU)
    step(module, [10, 11, 12])
    twin = copy.deepcopy(module)
    state = torch.get_rng_state()
    for other in (module, twin):
        with torch.no_grad():
            taken = other(features([13, 14]))[1]["a"].values()
    assert (weight_of(module)[taken] >= 5).all()
    assert weight_of(module)[taken].unique().numel() == 8
    assert torch.equal(weight_of(module), weight_of(twin))
    assert torch.equal(torch.get_rng_state(), state)


def test_without_an_attached_optimizer_rows_are_reset_and_their_gradient_too_and_it_warns_once() -> None:
    module = pooled(3, 1, disable_fallback=True, **LRU)
    start = weight_of(module).clone()
    rows = dict(zip([10, 11, 12], step(module, [10, 11, 12])["a"].values().tolist(), strict=True))
    with torch.no_grad():
        module.embedding_module._tables["t"].weight.add_(1)
    with pytest.warns(UserWarning, match="keeps the old id's state. Attach the optimizer") as caught:
        module(features([13]))
    module(features([14]))
    assert len(caught) == 1
    grad = module.embedding_module._tables["t"].weight.grad
    gone = [row for row in rows.values() if bool((grad[row] == 0).all())]
    assert len(gone) == 2
    assert torch.equal(weight_of(module)[gone], start[gone])


def test_evaluation_resets_nothing() -> None:
    module = pooled(3, 1, SGD(lr=1.0), disable_fallback=True, **LRU)
    step(module, [10, 11, 12])
    before = weight_of(module).clone()
    out, remapped = module.eval()(features([99, 10]))
    assert remapped["a"].values().numel() == 1
    assert torch.equal(weight_of(module), before)
    assert torch.equal(out["a"][0], before[remapped["a"].values()[0]])


def test_rows_that_are_shared_are_trained_by_all_who_share_them() -> None:
    module = pooled(4, 1, SGD(lr=1.0), disable_fallback=False, when_full="fallback")
    start = weight_of(module).clone()
    step(module, [1, 2, 3, 4, 5])
    assert torch.allclose(weight_of(module)[3], start[3] - 2)
    assert module.stats()["t"].features["a"].collisions == 2


# ------------------------------------------------------------------------------------------------------ capacity


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), Adam(lr=0.1, row_step=True), None])
@pytest.mark.parametrize(("size", "buckets"), [(48, None), (None, 6), (72, 4)])
@pytest.mark.filterwarnings("ignore:Table 't'. the resize replaces its weight parameter")
def test_growing_keeps_every_ids_row_and_optimizer_state(
    optimizer: OptimizerSpec | None, size: int | None, buckets: int | None
) -> None:
    module = pooled(24, 2, optimizer)
    ids = list(range(100, 112))
    for _ in range(2):
        step(module, ids)
    module.eval()
    batch = features(ids, [555])
    before, _ = module(batch)
    table = module.embedding_module._tables["t"]
    old = {id_: module.inspect("a", id_).row for id_ in ids}
    state = {name: value.clone() for name, value in table.rows.state.items()}
    live = module.stats()["t"].live
    moved = module.resize("t", size, buckets)
    assert moved.kept == module.stats()["t"].live == live
    after, _ = module(batch)
    assert torch.equal(after.values(), before.values())  # 555, which shares a row, too
    rows = size or 24 * buckets // 2
    assert weight_of(module).shape == (rows, 4)
    assert module.embedding_module.embedding_bag_configs()[0].num_embeddings == rows
    assert module.managed_collision_collection.embedding_configs()[0].num_embeddings == rows
    for name, value in state.items():
        for id_, row in old.items():
            if row is not None and value.dim():
                assert torch.equal(table.rows.state[name][module.inspect("a", id_).row], value[row])
        if not value.dim():
            assert torch.equal(table.rows.state[name], value)
    module.train()
    step(module, list(range(100, 140)))
    assert module.stats()["t"].live > live


def test_shrinking_keeps_what_it_can_and_says_what_not() -> None:
    module = pooled(24, 2, RowWiseAdagrad(lr=0.1))
    for id_ in range(22):
        step(module, [id_])
    live = module.stats()["t"].live
    moved = module.resize("t", 12)
    assert moved.kept + moved.dropped_ids.numel() == live
    assert module.stats()["t"].live == moved.kept
    assert all(module.inspect("a", id_).row is None for id_ in moved.dropped_ids.tolist())
    step(module, list(range(22)))


def test_a_resized_model_is_saved_and_loaded_as_one_of_its_size() -> None:
    module = pooled(24, 2, RowWiseAdagrad(lr=0.1))
    step(module, list(range(9)))
    module.resize("t", 48, 4)
    twin = pooled(48, 4, RowWiseAdagrad(lr=0.1))
    twin.load_state_dict(module.state_dict())
    twin.embedding_module.fused_optimizer.load_state_dict(module.embedding_module.fused_optimizer.state_dict())
    for ids in ([3, 4, 5], [100, 101], list(range(50))):
        assert torch.equal(step(module, ids)["a"].values(), step(twin, ids)["a"].values())
    assert torch.equal(weight_of(module), weight_of(twin))


def test_a_resize_that_cannot_be_leaves_everything() -> None:
    module = pooled(24, 2, RowWiseAdagrad(lr=0.1))
    step(module, [1, 2, 3])
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ConfigError, match="got 25 rows in 2 buckets"):
        module.resize("t", 25)
    with pytest.raises(ConfigError, match="got table 'plain'; expected a managed table"):
        module.resize("plain", 24)
    other = EmbeddingBagCollection([EmbeddingBagConfig(24, 4, "t", feature_names=["a", "b"])])
    other.embedding_bags["t"].weight = module.embedding_module._tables["t"].weight
    with pytest.raises(ConfigError, match="tied to another collection"):
        module.resize("t", 48)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_resizing_warns_of_a_table_that_others_step() -> None:
    module = pooled(24, 2)
    with pytest.warns(UserWarning, match="Create the optimizer that steps it again"):
        module.resize("t", 48)


# ----------------------------------------------------------------------------------------------------------- state


def test_training_goes_on_from_a_file_bit_for_bit() -> None:
    batches = [torch.randint(0, 60, (14,), generator=torch.Generator().manual_seed(s)).tolist() for s in range(8)]
    one, other = pooled(24, 2, RowWiseAdagrad(lr=0.1)), pooled(24, 2, RowWiseAdagrad(lr=0.1))
    for ids in batches[:4]:
        step(one, ids)
    buffer = io.BytesIO()
    faces = (one.embedding_module.fused_optimizer, other.embedding_module.fused_optimizer)
    torch.save({"model": one.state_dict(), "optimizer": faces[0].state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other.load_state_dict(saved["model"])
    faces[1].load_state_dict(saved["optimizer"])
    for ids in batches[4:]:
        assert torch.equal(step(one, ids)["a"].values(), step(other, ids)["a"].values())
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_state_of_other_buckets_changes_no_table_either() -> None:
    module, state = pooled(24, 2), pooled(24, 4).state_dict()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ConfigError, match=r"of 4 buckets of 6 rows .* expected 2 of 12"):
        module.load_state_dict(state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("lacks", ["_managed_collision_modules.t.hits", "embedding_bags.plain.weight", "_modules.t."])
def test_a_state_cut_short_changes_nothing(lacks: str) -> None:
    module, saved = pooled(optimizer=RowWiseAdagrad(lr=0.5)), pooled(optimizer=RowWiseAdagrad(lr=0.5))
    step(saved, [1, 2, 3])
    state = {name: value for name, value in saved.state_dict().items() if lacks not in name}
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ConfigError, match=f"lacks .*{lacks}"):
        module.load_state_dict(state)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("wrong", ["an id outside of `plain`", "no weights", "a missing key", "no inverse"])
def test_a_batch_that_the_tables_would_refuse_gives_no_id_a_row(wrong: str) -> None:
    configs = [
        EmbeddingBagConfig(12, 4, "t", feature_names=["a", "b"]),
        EmbeddingBagConfig(9, 3, "plain", feature_names=["p"]),
    ]
    module = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(configs, is_weighted=wrong == "no weights"),
        ManagedCollisionCollection({"t": HashZchManagedCollisionModule(12, "cpu", 2)}, configs),
    )
    batch = features([1, 2], [3])
    if wrong == "an id outside of `plain`":
        batch = KeyedJaggedTensor(["a", "b", "p"], torch.tensor([1, 2, 9]), lengths=torch.tensor([1, 1, 1]))
    if wrong == "a missing key":
        batch = batch.permute([0, 1])
    if wrong == "no inverse":
        strides = [[1], [1], [2]]
        batch = KeyedJaggedTensor(
            ["a", "b", "p"], torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4, dtype=torch.int64),
            stride_per_key_per_rank=strides,
        )  # fmt: skip
    with pytest.raises(InputError):
        module(batch)
    assert module.stats()["t"].live == 0
    assert module.managed_collision_collection.modules_by_table["t"].step == 0


def test_collections_of_other_tables_are_refused() -> None:
    config = EmbeddingBagConfig(12, 4, "t", feature_names=["a"])
    mcc = ManagedCollisionCollection({"t": MCHManagedCollisionModule(12, "cpu", LFU_EvictionPolicy(), 1)}, [config])
    for other, words in (
        (EmbeddingBagConfig(12, 4, "s", feature_names=["a"]), "expected a table of the embedding module"),
        (EmbeddingBagConfig(13, 4, "t", feature_names=["a"]), "has num_embeddings=13 .* but 12"),
        (EmbeddingBagConfig(12, 4, "t", feature_names=["b"]), "has feature_names"),
    ):
        with pytest.raises(ConfigError, match=words):
            ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection([other]), mcc)
    sequence = EmbeddingCollection([EmbeddingConfig(12, 4, "t", feature_names=["a"])])
    with pytest.raises(ConfigError, match="got a EmbeddingCollection; expected a EmbeddingBagCollection"):
        ManagedCollisionEmbeddingBagCollection(sequence, mcc)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a ManagedCollisionCollection"):
        ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection([config]), sequence)  # type: ignore[arg-type]


def test_a_setting_without_effect_is_named() -> None:
    config = EmbeddingBagConfig(12, 4, "t", feature_names=["a"])
    mcc = ManagedCollisionCollection({"t": HashZchManagedCollisionModule(12, "cpu", 2)}, [config])
    with pytest.warns(UserWarning, match="allow_in_place_embed_weight_update") as caught:
        ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection([config]), mcc, allow_in_place_embed_weight_update=True
        )
    assert caught[0].filename == __file__


class Pooled(torch.nn.Module):
    def __init__(self, ids: ManagedCollisionEmbeddingBagCollection) -> None:
        super().__init__()
        self.ids = ids

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        return self.ids(KeyedJaggedTensor(["a", "b", "p"], values, lengths=lengths))[0].values()


def exported(model: Pooled) -> Any:
    batch = features([1, 2, 70], [3])
    shapes = ({0: torch.export.Dim.DYNAMIC}, None)
    return torch.export.export(model, (batch.values(), batch.lengths()), dynamic_shapes=shapes, strict=False)


def test_an_exported_module_reads_the_ids_that_it_had() -> None:
    model = Pooled(pooled())
    step(model.ids, [1, 2, 3], [4, -5])
    program = exported(model.eval()).module()
    before = copy.deepcopy(model.state_dict())
    for ids, others in (([1, 2, 70], [3]), ([-5], []), ([9, 8, 7, 4, 4], [-5, 2**63 - 1])):
        batch = features(ids, others)
        got = program(batch.values(), batch.lengths())
        assert torch.equal(got, model(batch.values(), batch.lengths()))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("options", "training", "words"),
    [
        ({}, True, "is in training mode. Call eval"),
        ({"when_full": "reject"}, False, "drops ids without a row"),
    ],
)
def test_what_cannot_be_exported_is_named(options: dict[str, Any], training: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        exported(Pooled(pooled(**options)).train(training))
