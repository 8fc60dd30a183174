"""Cached tables of a module that is not sharded give the same bits as tables that are not cached."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.storage.cache_model import ModelCache
from tests.storage.cached_tables import (
    KEYS,
    assert_same,
    batch,
    ebc,
    ec,
    everything,
    output,
    parameter_name,
    spare_only,
    step,
)
from tilerec import (
    CacheAlgorithm,
    DataType,
    EmbeddingBagCollection,
    InputError,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    cache_tables,
    flush_caches,
)
from tilerec.spec.optimizer import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    OptimizerSpec,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from tilerec.storage.cache_stats import CacheStats
from tilerec.storage.table_rows import NonFiniteGradientError, TableRows

RULES: list[OptimizerSpec] = [
    SGD(0.1), SGD(0.1, momentum=0.9), Adagrad(0.1), RowWiseAdagrad(0.1, max_norm=1.0), Adam(0.1),
    AdamW(0.1, weight_decay=0.1), PartialRowWiseAdam(0.1), LAMB(0.1), PartialRowWiseLAMB(0.1), LarsSGD(0.1),
]  # fmt: skip
BOTH = [CacheAlgorithm.LRU, CacheAlgorithm.LFU]


@pytest.mark.parametrize("algorithm", BOTH, ids=parameter_name)
@pytest.mark.parametrize("spec", RULES, ids=parameter_name)
def test_every_optimizer_twenty_steps_same_bits(spec: OptimizerSpec, algorithm: CacheAlgorithm) -> None:
    plain, other = ebc(spec), cache_tables(ebc(spec), 0.15, algorithm)
    rng = random.Random(1)
    for _ in range(20):
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)
    stats = other.cache_stats()
    assert min(stats["a"].hits, stats["a"].evictions, stats["a"].write_backs) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("spec", [SGD(0.1), RowWiseAdagrad(0.1), Adam(0.1)], ids=parameter_name)
def test_rows_of_other_types_round_by_their_own_numbers(spec: OptimizerSpec, dtype: torch.dtype) -> None:
    plain, other = ebc(spec, dtype=dtype), cache_tables(ebc(spec, dtype=dtype), 0.15)
    rng = random.Random(2)
    for _ in range(5 if dtype == torch.float64 else 20):  # fp64 goes to the reference
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)


@pytest.mark.parametrize("load_factor", [0.01, 0.3, 1.0])
def test_caches_of_one_set_to_all_sets(load_factor: float) -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), load_factor)
    rng = random.Random(3)
    for _ in range(12):
        kjt = batch(rng, samples=25, most=9)  # more distinct rows than a set has lines
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)
    stats = other.cache_stats()["a"]
    assert stats.rows == stats.hits + stats.misses
    assert bool(stats.conflict_misses) == (load_factor == 0.01)
    if load_factor == 1.0:
        assert stats.evictions == 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("make", [ebc, ec])
def test_pooled_weighted_and_sequence_modules(make: Callable[..., Any], weighted: bool) -> None:
    more = {"weighted": True} if weighted and make is ebc else {}
    plain, other = make(RowWiseAdagrad(0.1), **more), cache_tables(make(RowWiseAdagrad(0.1), **more), 0.15)
    rng = random.Random(4)
    for _ in range(10):
        kjt = batch(rng, weighted=bool(more))
        grads = []
        outs = []
        for module in (plain, other):
            own = kjt
            if more:
                own = KeyedJaggedTensor.from_lengths_sync(
                    KEYS, kjt.values(), kjt.lengths(), kjt.weights().clone().requires_grad_()
                )
            outs.append(step(module, own))
            grads.append(own.weights().grad if more else None)
        assert torch.equal(*outs)
        if more:
            assert torch.equal(grads[0], grads[1])
    assert_same(plain, other)


def test_gradients_are_divided_alike_with_a_cache_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of ranks that they are summed over."""
    monkeypatch.setattr(TableRows, "divisor", property(lambda self: 4.0))
    for spec in (SGD(0.1), RowWiseAdagrad(0.1)):
        plain, other, rng = ebc(spec), cache_tables(ebc(spec), 0.15), random.Random(44)
        for _ in range(3):
            kjt = batch(rng)
            assert torch.equal(step(plain, kjt), step(other, kjt))
        assert_same(plain, other)


def test_lines_for_batches_in_flight_only() -> None:
    plain, other = ebc(Adam(0.1)), spare_only(ebc(Adam(0.1)))
    rng = random.Random(20)
    for _ in range(8):
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)
    stats = other.cache_stats()["a"]
    assert (stats.misses, stats.evictions) == (stats.conflict_misses, 0)


@pytest.mark.parametrize("spec", [SGD(0.1), RowWiseAdagrad(0.1)], ids=parameter_name)
def test_rows_of_eight_bits(spec: OptimizerSpec) -> None:
    plain, other = (ebc(spec, data_type=DataType.FP8) for _ in range(2))
    cache_tables(other, 0.15)
    rng = random.Random(21)
    for _ in range(3):
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    for a, b in zip(everything(plain), everything(other), strict=True):
        assert torch.equal(a.float(), b.float())


def test_weights_of_samples_have_gradients_where_the_table_is_frozen() -> None:
    plain, other = ebc(None, weighted=True), cache_tables(ebc(None, weighted=True), 0.15)
    kjt, grads = batch(random.Random(22), weighted=True), []
    for module in (plain, other):
        module.requires_grad_(False)
        own = kjt.weights().clone().requires_grad_()
        step(module, KeyedJaggedTensor.from_lengths_sync(KEYS, kjt.values(), kjt.lengths(), own))
        grads.append(own.grad)
    assert grads[0] is not None
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("keys", [["f", "g", "h"], ["h", "f", "g"]])
def test_variable_batches(keys: list[str]) -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15)
    rng = random.Random(5)
    for _ in range(6):
        strides = [rng.randrange(1, 6) for _ in keys]
        lengths = [rng.randrange(4) for _ in range(sum(strides))]
        ids = torch.tensor([rng.randrange(77) for _ in range(sum(lengths))], dtype=torch.int64)
        inverse = torch.stack([torch.tensor([rng.randrange(s) for _ in range(6)]) for s in strides])
        kjt = KeyedJaggedTensor(
            keys, ids, lengths=torch.tensor(lengths), stride_per_key_per_rank=[[s] for s in strides],
            inverse_indices=(keys, inverse),
        )  # fmt: skip
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)


@pytest.mark.parametrize("algorithm", BOTH, ids=parameter_name)
def test_counts_are_those_of_a_cache_in_plain_python(algorithm: CacheAlgorithm) -> None:
    module = cache_tables(ebc(SGD(0.1)), 0.2, algorithm)
    tables = {"a": (300, ["f", "g"]), "b": (200, ["g"]), "c": (77, ["h"])}
    models = {t: ModelCache(-(-round(0.2 * rows) // 32), 32, algorithm) for t, (rows, _) in tables.items()}
    rng, ids = random.Random(6), dict.fromkeys(tables, 0)
    for _ in range(15):
        kjt = batch(rng, samples=20)
        step(module, kjt)
        for name, (_, features) in tables.items():
            own = [i for feature in features for i in kjt[feature].values().tolist()]
            ids[name] += len(own)
            models[name].request(set(own))
    flush_caches(module)
    for name, stats in module.cache_stats().items():
        model = models[name]
        assert (stats.hits, stats.misses) == (model.hits, model.misses)
        assert (stats.conflict_misses, stats.evictions) == (model.conflicts, model.evictions)
        assert (stats.requests, stats.ids, stats.rows) == (15, ids[name], model.hits + model.misses)
        assert stats.hit_rate == model.hits / stats.rows
    assert module.cache_stats(reset=True)["a"].requests == 15
    assert module.cache_stats()["a"] == CacheStats()


def test_rows_that_are_only_read_are_not_written_back() -> None:
    module, rng = cache_tables(ebc(SGD(0.1)), 0.2), random.Random(42)
    with torch.no_grad():
        for _ in range(6):
            output(module, batch(rng, samples=20))
    flush_caches(module)
    stats = module.cache_stats()["a"]
    assert stats.evictions > 0
    assert stats.write_backs == 0


def test_counts_of_requests_stop_at_the_largest_number_there_is() -> None:
    """Round to the least, the row that is used most would be the first to go."""
    module = cache_tables(ebc(SGD(0.1)), 0.2, CacheAlgorithm.LFU)
    kjt = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.tensor([5]), torch.tensor([1, 0, 0]))
    step(module, kjt)
    counts = module.embedding_bags["a"].rows.cache.tensors.sets.count_E
    counts[5] = 2**31 - 2
    for _ in range(3):
        step(module, kjt)
    assert int(counts[5]) == 2**31 - 1


def test_a_bad_id_changes_nothing_whether_prefetched_or_looked_up() -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15)
    rng = random.Random(8)
    first = batch(rng)
    step(plain, first)
    step(other, first)
    before = (
        other.cache_stats(),
        [t.rows.cache.tensors.sets.names.clone() for t in other.embedding_bags.values()],
    )
    bad = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.tensor([5, 9, 300, 2]), torch.tensor([2, 1, 1]))
    message = r"Table '[ab]': got id 300 of feature 'g' \(position 2 of the batch's values\); expected ids in \[0, "
    for call in (other.prefetch, other, plain):
        with pytest.raises(InputError, match=message):
            call(bad)
    assert str(other.cache_stats()["a"]) == str(before[0]["a"])
    for table, names in zip(other.embedding_bags.values(), before[1], strict=True):
        assert torch.equal(table.rows.cache.tensors.sets.names, names)
    negative = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.tensor([-1]), torch.tensor([0, 0, 1]))
    with pytest.raises(InputError, match="Table 'c': got id -1 of feature 'h'"):
        other(negative)
    kjt = batch(rng)
    assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)


def test_a_gradient_that_is_not_finite_names_the_row_and_leaves_it_alone() -> None:
    plain, other = ebc(SGD(0.1)), cache_tables(ebc(SGD(0.1)), 0.15)
    kjt = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.tensor([250, 40, 7]), torch.tensor([2, 0, 1]))
    texts = []
    for module in (plain, other):
        out = output(module, kjt)
        grad = torch.ones_like(out)
        grad[0, 0] = float("nan")
        with pytest.raises(NonFiniteGradientError, match="row 40") as caught:
            out.backward(grad)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert_same(plain, other)


def test_two_lookups_of_one_table_in_a_step_update_it_once() -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15)
    rng = random.Random(9)
    for _ in range(5):
        first, second = batch(rng), batch(rng)
        for module in (plain, other):
            a, b = output(module, first), output(module, second)
            ((a * a).sum() + (b * b).sum()).backward()
    assert_same(plain, other)


def test_tables_shared_by_two_collections_share_their_cache() -> None:
    modules = []
    for wants_cache in (False, True):
        bags, rows = ebc(None), ec(None)
        rows.embeddings["a"] = bags.embedding_bags["a"]
        both = nn.ModuleList([bags, rows])
        apply_optimizer_in_backward(Adam(0.1), both.parameters())
        modules.append(cache_tables(both, 0.15) if wants_cache else both)
    rng = random.Random(10)
    for _ in range(6):
        kjt = batch(rng)
        for bags, rows in modules:
            a, b = output(bags, kjt), output(rows, kjt)
            ((a * a).sum() + (b * b).sum()).backward()
    assert modules[1][0].embedding_bags["a"].rows.cache is modules[1][1].embeddings["a"].rows.cache
    for plain, other in zip(*modules, strict=True):
        assert_same(plain, other)


def test_some_tables_of_a_collection_may_be_cached() -> None:
    plain, other = ebc(Adam(0.1)), ebc(Adam(0.1))
    cache_tables(other.embedding_bags["b"], 0.1)
    rng = random.Random(11)
    for _ in range(6):
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert list(other.cache_stats()) == ["b"]
    assert_same(plain, other)


def test_ids_that_are_clamped() -> None:
    modules = []
    for _ in range(2):
        torch.manual_seed(3)
        module = EmbeddingBagCollection(ebc(None).embedding_bag_configs(), on_bad_id="clamp")
        apply_optimizer_in_backward(Adam(0.1), module.parameters())
        modules.append(module)
    modules[1].load_state_dict(modules[0].state_dict())
    plain, other = modules[0], cache_tables(modules[1], 0.15)
    rng = random.Random(24)
    for _ in range(4):
        kjt = batch(rng)
        kjt = KeyedJaggedTensor.from_lengths_sync(KEYS, kjt.values() * 3 - 20, kjt.lengths())
        other.prefetch(kjt)
        with pytest.warns(UserWarning, match="were clamped"):
            want, got = step(plain, kjt), step(other, kjt)
        assert torch.equal(want, got)
    assert_same(plain, other)
    # Once per batch and lookup: what reads "a" is clamped to several sizes.
    assert {name: stats.requests for name, stats in other.cache_stats().items()} == {"a": 12, "b": 4, "c": 4}
    assert other.clamped_ids == plain.clamped_ids


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, where a graph goes on after a break
def test_under_torch_compile_a_cached_lookup_is_a_graph_break() -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15)
    compiled = torch.compile(lambda kjt: other(kjt).values() * 2.0, backend="eager")
    rng = random.Random(25)
    for _ in range(3):
        kjt = batch(rng)
        want, got = plain(kjt).values() * 2.0, compiled(kjt)
        assert torch.equal(want, got)
        for out in (want, got):
            (out * out).sum().backward()
    assert_same(plain, other)


def test_a_weight_that_functional_call_puts_in_place_is_read_where_it_is() -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15)
    kjt = batch(random.Random(26))
    weights = {name: value.detach() * 2.0 for name, value in plain.named_parameters()}
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            outs = [torch.func.functional_call(module, weights, (kjt,)).values() for module in (plain, other)]
        assert torch.equal(*outs)
    assert other.cache_stats()["a"].requests == 0


def test_a_module_on_meta_says_the_shape_of_its_output() -> None:
    module = cache_tables(ebc(None).to("meta"), 0.2)
    module.requires_grad_(False)
    assert output(module, batch(random.Random(36)).to(torch.device("meta"))).shape == (7, 31)


@pytest.mark.parametrize("load_factor", [0.01, 0.5])
def test_an_evaluation_in_inference_mode_may_come_first_and_in_between(load_factor: float) -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), load_factor)
    rng = random.Random(31)
    for samples in (5, 25, 60):  # spare lines grow in the evaluation
        with torch.inference_mode():
            kjt = batch(rng, samples=samples)
            assert torch.equal(plain(kjt).values(), other(kjt).values())
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)
