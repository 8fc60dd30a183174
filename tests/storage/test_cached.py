"""Cached tables of a module that is not sharded give the same bits as tables that are not cached."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.storage.cache_model import ModelCache
from tests.storage.cached_tables import KEYS, batch, ebc, everything, output, step
from tilerec import (
    CacheAlgorithm,
    CacheParams,
    ConfigError,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    InputError,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    cache_tables,
    flush_caches,
    uncache_tables,
)
from tilerec.modules.cached_tables import iter_table_rows, set_cache
from tilerec.modules.row_reset import reset_rows
from tilerec.modules.table_resize import resize_table
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
from tilerec.storage import row_cache
from tilerec.storage.batches_in_flight import BatchesInFlight
from tilerec.storage.cache_stats import CacheStats
from tilerec.storage.table_rows import NonFiniteGradientError, TableRows

RULES: list[OptimizerSpec] = [
    SGD(0.1), SGD(0.1, momentum=0.9), Adagrad(0.1), RowWiseAdagrad(0.1, max_norm=1.0), Adam(0.1),
    AdamW(0.1, weight_decay=0.1), PartialRowWiseAdam(0.1), LAMB(0.1), PartialRowWiseLAMB(0.1), LarsSGD(0.1),
]  # fmt: skip
BOTH = [CacheAlgorithm.LRU, CacheAlgorithm.LFU]


def _name(value: object) -> str:
    return type(value).__name__ if isinstance(value, OptimizerSpec) else str(getattr(value, "value", value))


def ec(spec: OptimizerSpec | None) -> EmbeddingCollection:
    torch.manual_seed(3)
    tables = [
        EmbeddingConfig(300, 8, "a", feature_names=["f", "g"]),
        EmbeddingConfig(200, 8, "b", feature_names=["g"]),
        EmbeddingConfig(77, 4, "c", feature_names=["h"]),
    ]
    module = EmbeddingCollection(tables)
    if spec is not None:
        apply_optimizer_in_backward(spec, module.parameters())
    return module


def assert_same(first: Any, second: Any) -> None:
    for a, b in zip(everything(first), everything(second), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("algorithm", BOTH, ids=_name)
@pytest.mark.parametrize("spec", RULES, ids=_name)
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
@pytest.mark.parametrize("spec", [SGD(0.1), RowWiseAdagrad(0.1), Adam(0.1)], ids=_name)
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
    plain, other = ebc(Adam(0.1)), _spare_only(ebc(Adam(0.1)))
    rng = random.Random(20)
    for _ in range(8):
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)
    stats = other.cache_stats()["a"]
    assert (stats.misses, stats.evictions) == (stats.conflict_misses, 0)


@pytest.mark.parametrize("spec", [SGD(0.1), RowWiseAdagrad(0.1)], ids=_name)
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


def _spare_only(module: Any) -> Any:
    """Tables whose rows are in lines only as long as their batch is in flight."""
    for table, rows in list(iter_table_rows(module)):
        set_cache(table, rows, None, None)
    return module


def _interleaved(rng: random.Random, depth: int, algorithm: CacheAlgorithm, make: Callable[..., Any]) -> None:
    """Batches are prefetched up to `depth` ahead of their forward, at random moments, and disturbed."""
    plain, factor = make(Adam(0.1)), rng.choice([0.0, 0.01, 0.15, 0.4])
    other = cache_tables(make(Adam(0.1)), factor, algorithm) if factor else _spare_only(make(Adam(0.1)))
    batches = [batch(rng, samples=rng.choice([0, 1, 9, 25])) for _ in range(14)]
    ahead = 0

    def maybe_prefetch(at: int) -> int:
        nonlocal ahead
        ahead = max(ahead, at)
        while ahead < min(at + depth, len(batches)) and rng.random() < 0.7:
            if rng.random() < 0.8:  # some batches are forgotten
                other.prefetch(batches[ahead])
            ahead += 1
        return ahead

    at = 0
    while at < len(batches):
        maybe_prefetch(at)
        many = min(rng.choice([1, 1, 1, 2]), len(batches) - at)  # at times, two forwards come before any backward
        kjts = batches[at : at + many]
        wants, gots = [output(plain, k) for k in kjts], []
        for kjt in kjts:
            gots.append(output(other, kjt))
            maybe_prefetch(at + many)
        event = rng.random()
        if event < 0.1:
            flush_caches(other)
        elif event < 0.2:  # a batch is looked at and not trained on
            with torch.no_grad():
                assert torch.equal(output(plain, batches[0]), output(other, batches[0]))
        elif event < 0.25:  # a forward without a backward
            output(other, batches[rng.randrange(len(batches))])
        order = list(range(many))
        rng.shuffle(order)
        for i in order:
            assert torch.equal(wants[i], gots[i])
            (wants[i] * wants[i]).sum().backward()
            (gots[i] * gots[i]).sum().backward()
            maybe_prefetch(at + many)
        at += many
    assert_same(plain, other)


@pytest.mark.parametrize("make", [ebc, ec])
@pytest.mark.parametrize("algorithm", BOTH, ids=_name)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefetches_interleaved_at_random_change_no_bit(
    depth: int, algorithm: CacheAlgorithm, make: Callable[..., Any]
) -> None:
    for seed in range(int(os.environ.get("TILEREC_TEST_EXAMPLES", "30")) // 15):
        _interleaved(random.Random(100 * depth + seed), depth, algorithm, make)


@pytest.mark.parametrize("algorithm", BOTH, ids=_name)
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


def test_a_batch_prefetched_in_inference_mode_is_trained_on() -> None:
    plain, other, rng = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15), random.Random(43)
    kjt = batch(rng)
    with torch.inference_mode():
        other.prefetch(kjt)
    assert torch.equal(step(plain, kjt), step(other, kjt))
    _goes_on_alike(plain, other, rng)


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


def test_a_prefetched_batch_is_asked_for_once() -> None:
    module, rng = cache_tables(ebc(SGD(0.1)), 0.2), random.Random(7)
    kjt = batch(rng)
    assert module.prefetch(kjt) is kjt
    step(module, kjt)
    assert module.cache_stats()["a"].requests == 1


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


# ------------------------------------------------------------------------------- whoever reads or writes whole tables


def _trained(spec: OptimizerSpec | None = None, steps: int = 6) -> tuple[Any, Any, random.Random]:
    spec = spec or Adam(0.1)
    plain, other = ebc(spec), cache_tables(ebc(spec), 0.15)
    rng = random.Random(12)
    for _ in range(steps):
        kjt = batch(rng)
        step(plain, kjt)
        step(other, kjt)
    return plain, other, rng


def _goes_on_alike(plain: Any, other: Any, rng: random.Random) -> None:
    for _ in range(3):
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)


def test_reading_a_weight_by_its_name_shows_the_newest_rows() -> None:
    plain, other, rng = _trained()
    kept = other.embedding_bags["a"].weight
    assert torch.equal(plain.embedding_bags["a"].weight, kept)
    kjt = batch(rng)
    step(plain, kjt)
    step(other, kjt)
    assert not torch.equal(plain.embedding_bags["a"].weight, kept)  # a kept one is of the last flush
    flush_caches(other)
    assert torch.equal(plain.embedding_bags["a"].weight, kept)


def test_writing_a_weight_by_its_name_is_seen_by_the_next_batch() -> None:
    plain, other, rng = _trained()
    for module in (plain, other):
        with torch.no_grad():
            module.embedding_bags["a"].weight.mul_(0.5)
            module.embedding_bags["b"].weight.data[3] = 1.0
    _goes_on_alike(plain, other, rng)


def test_state_dicts_midway_load_into_cached_and_uncached_modules() -> None:
    plain, other, rng = _trained()
    saved = io.BytesIO()
    torch.save((other.state_dict(), other.fused_optimizer.state_dict()), saved)
    saved.seek(0)
    weights, state = torch.load(saved)
    for _ in range(3):
        step(other, batch(rng))  # goes astray
    fresh = ebc(Adam(0.1))
    for module in (other, fresh):
        module.load_state_dict(weights)
        module.fused_optimizer.load_state_dict(state)
        assert_same(plain, module)
    twin = copy.deepcopy(rng)
    _goes_on_alike(plain, other, rng)
    assert_same(ebc(Adam(0.1)), ebc(Adam(0.1)))
    for _ in range(3):
        step(fresh, batch(twin))
    assert_same(fresh, other)


def test_loading_by_assignment_takes_the_new_memory() -> None:
    plain, other, rng = _trained()
    weights = {name: value.clone() for name, value in ebc(None).state_dict().items()}
    plain.load_state_dict(weights)
    other.load_state_dict({name: value.clone() for name, value in weights.items()}, assign=True)
    _goes_on_alike(plain, other, rng)


def test_a_face_that_was_made_before_the_cache_shows_the_newest_state() -> None:
    plain, other = ebc(Adam(0.1)), ebc(Adam(0.1))
    face = other.fused_optimizer
    cache_tables(other, 0.15)
    kjt = batch(random.Random(13))
    step(plain, kjt)
    step(other, kjt)
    other.state_dict()  # empties the cache
    step(plain, kjt)
    step(other, kjt)
    want = plain.fused_optimizer.state_dict()["state"]
    for name, state in face.state_dict()["state"].items():
        for slot, value in state.items():
            assert torch.equal(value, want[name][slot])
    saved = copy.deepcopy(face.state_dict())
    for module in (plain, other):
        step(module, kjt)
    face.load_state_dict(saved)
    plain.fused_optimizer.load_state_dict(saved)
    _goes_on_alike(plain, other, random.Random(14))


def test_reading_one_slot_of_the_face_shows_the_newest_state() -> None:
    plain, other, _ = _trained()
    name = "embedding_bags.a.weight"
    faces = [module.fused_optimizer for module in (plain, other)]
    slots = [face.state[face.params[name]]["exp_avg"] for face in faces]
    assert torch.equal(*slots)
    assert sorted(faces[1].state[faces[1].params[name]]) == ["exp_avg", "exp_avg_sq", "step"]


def test_a_written_rate_holds_from_the_next_backward() -> None:
    plain, other, rng = _trained()
    for module in (plain, other):
        module.fused_optimizer.param_groups[0]["lr"] = 0.01
    _goes_on_alike(plain, other, rng)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_the_newest_rows_and_a_cache_of_their_own(how: str) -> None:
    plain, other, rng = _trained()
    twin = copy.deepcopy(other) if how == "deepcopy" else pickle.loads(pickle.dumps(other))
    assert twin.embedding_bags["a"].rows.cache is not other.embedding_bags["a"].rows.cache
    state = rng.getstate()
    _goes_on_alike(plain, twin, rng)
    rng.setstate(state)
    for _ in range(3):
        step(other, batch(rng))
    assert_same(plain, other)


def test_rows_are_reset_with_their_state() -> None:
    plain, other, rng = _trained()
    for module in (plain, other):
        reset_rows(module.embedding_bags["a"], torch.tensor([0, 1, 2, 250]))
    _goes_on_alike(plain, other, rng)


def test_rows_of_a_prefetched_batch_are_reset_before_its_forward() -> None:
    plain, other, rng = _trained()
    kjt = batch(rng)
    other.prefetch(kjt)
    for module in (plain, other):
        reset_rows(module.embedding_bags["a"], kjt["f"].values())
    assert torch.equal(step(plain, kjt), step(other, kjt))
    _goes_on_alike(plain, other, rng)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_row_that_moves_from_a_spare_line_takes_its_last_update_along(dtype: torch.dtype) -> None:
    plain, other = ebc(SGD(0.1), dtype=dtype), cache_tables(ebc(SGD(0.1), dtype=dtype), 0.01)  # one set
    ids = torch.arange(40)  # 32 rows have a line of the set, 8 a spare one
    first = KeyedJaggedTensor.from_lengths_sync(KEYS, ids, torch.tensor([40, 0, 0]))
    assert torch.equal(step(plain, first), step(other, first))
    seat = other.embedding_bags["a"].rows.cache.tensors.sets.line_of_E
    assert int(seat[39]) >= 32
    last = KeyedJaggedTensor.from_lengths_sync(KEYS, ids[39:], torch.tensor([1, 0, 0]))
    with torch.no_grad():
        assert torch.equal(output(plain, last), output(other, last))
    assert int(seat[39]) < 32
    assert_same(plain, other)


def test_all_parameters_are_reset() -> None:
    plain, other, rng = _trained()
    for module in (plain, other):
        module.reset_parameters()
    _goes_on_alike(plain, other, rng)


def test_a_table_gets_more_rows() -> None:
    plain, other, rng = _trained()
    for module in (plain, other):
        resize_table(module, "a", 400, torch.arange(300), torch.arange(300) + 50)
    assert torch.equal(plain.embedding_bags["a"].weight, other.embedding_bags["a"].weight)
    _goes_on_alike(plain, other, rng)


def test_another_type_takes_the_newest_rows_along() -> None:
    plain, other, rng = _trained()
    plain.to(torch.bfloat16)
    other.to(torch.bfloat16)
    assert other.cache_stats()
    _goes_on_alike(plain, other, rng)


def test_another_optimizer_starts_with_fresh_state() -> None:
    plain, other, rng = _trained()
    for module in (plain, other):
        apply_optimizer_in_backward(RowWiseAdagrad(0.1), module.parameters(), replace=True)
    _goes_on_alike(plain, other, rng)


def test_caching_again_and_not_any_more_changes_no_bit() -> None:
    plain, other, rng = _trained()
    cache_tables(other, 1.0, "lfu")
    _goes_on_alike(plain, other, rng)
    assert uncache_tables(other).cache_stats() == {}
    _goes_on_alike(plain, other, rng)


def test_a_module_on_meta_gets_its_rows_and_keeps_its_cache() -> None:
    plain, other = ebc(Adam(0.1)), EmbeddingBagCollection(ebc(None).embedding_bag_configs(), device="meta")
    other.seed = plain.seed
    apply_optimizer_in_backward(Adam(0.1), other.parameters())
    cache_tables(other, 0.15).to_empty(device="cpu")
    other.load_state_dict(plain.state_dict())
    _goes_on_alike(plain, other, random.Random(14))
    assert other.cache_stats()["a"].rows


def test_what_is_written_behind_a_flush_stands_though_a_lookup_waits_for_its_backward() -> None:
    """Which copies its rows when the tables are flushed: no table is brought back by another one's copies."""
    outs, modules = [], [ebc(Adam(0.1), weighted=True), cache_tables(ebc(Adam(0.1), weighted=True), 0.3)]
    kjt = batch(random.Random(40), weighted=True)
    for module in modules:
        weights = kjt.weights().clone().requires_grad_()
        kept = [table.weight for table in module.embedding_bags.values()]
        out = output(module, KeyedJaggedTensor.from_lengths_sync(KEYS, kjt.values(), kjt.lengths(), weights))
        flush_caches(module)
        for weight in kept:
            weight.data.mul_(0.5)
        (out * out).sum().backward()
        outs.append(weights.grad)
    assert_same(*modules)


def test_an_evaluation_between_a_lookup_and_its_update_lets_go_of_nothing() -> None:
    module, kjt = cache_tables(ebc(Adam(0.1)), 0.15), batch(random.Random(41))
    out = output(module, kjt)
    with torch.no_grad():
        output(module, kjt)
    (out * out).sum().backward()
    assert module.cache_stats()["a"].requests == 1
    assert all(not rows.cache.in_flight for _, rows in iter_table_rows(module))


# --------------------------------------------------------------------------------------------- what is refused


def test_a_table_without_an_optimizer_is_read_and_not_trained() -> None:
    plain, other = ebc(None), cache_tables(ebc(None), 0.15)
    kjt = batch(random.Random(15))
    with torch.no_grad():
        assert torch.equal(output(plain, kjt), output(other, kjt))
    with pytest.raises(ConfigError, match=r"Table 'a': it is cached and has no attached optimizer.*requires_grad_"):
        output(other, kjt)
    other.requires_grad_(False)
    assert torch.equal(output(plain, kjt), output(other, kjt))


def test_asking_autograd_for_a_cached_tables_gradient_is_an_error() -> None:
    module = cache_tables(ebc(SGD(0.1)), 0.15)
    out = output(module, batch(random.Random(16)))
    with pytest.raises(RuntimeError, match="cached table"):
        torch.autograd.grad(out.sum(), [module.embedding_bags["a"].weight])


def test_a_second_backward_is_an_error_and_updates_nothing() -> None:
    module = cache_tables(ebc(SGD(0.1)), 0.15)
    out = output(module, batch(random.Random(17))).sum()
    out.backward(retain_graph=True)
    before = everything(module)
    with pytest.raises(RuntimeError, match="a second time"):
        out.backward()
    for a, b in zip(before, everything(module), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("load_factor", [0.0, -0.1, 1.5, float("nan"), "0.2", True])
def test_a_load_factor_outside_its_range_is_refused(load_factor: Any) -> None:
    with pytest.raises(ConfigError, match=r"got load_factor=.*above 0 and at most 1"):
        cache_tables(ebc(None), load_factor)
    with pytest.raises(ConfigError, match="load_factor"):
        CacheParams(load_factor=load_factor)


def test_words_that_say_nothing_are_refused_or_warned_about() -> None:
    with pytest.raises(ConfigError, match="CacheAlgorithm"):
        cache_tables(ebc(None), 0.2, "mru")
    with pytest.raises(ConfigError, match="without tables"):
        cache_tables(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="reserved_memory"):
        CacheParams(reserved_memory=-1.0)
    with pytest.warns(UserWarning, match="precision"):
        CacheParams(precision="FP16")
    assert CacheParams.from_json(CacheParams("lfu", 0.5, 8.0).to_json()) == CacheParams("lfu", 0.5, 8.0)


def test_no_memory_for_the_lines_is_told_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, kjt = cache_tables(ebc(SGD(0.1)), 0.2), batch(random.Random(18))

    def none(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(row_cache.torch, "empty", none)
    message = r"Table 'a': no memory on cpu for 64 cache lines of 32 bytes"
    with torch.no_grad(), pytest.raises(ConfigError, match=message):
        module(kjt)


def test_without_memory_beside_the_lines_for_more_of_them_the_cache_is_emptied_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.1)
    rng, cat = random.Random(23), torch.cat
    failed = []

    def full(tensors: Any, *rest: Any, **more: Any) -> Tensor:
        lines = other.embedding_bags["a"].rows.cache.tensors.lines
        if any(tensor is own for tensor in tensors for own in lines[1:]):  # the second one, when the first is longer
            failed.append(True)
            raise RuntimeError("out of memory")
        return cat(tensors, *rest, **more)

    kjt = batch(rng)
    other.prefetch(kjt)
    assert torch.equal(step(plain, kjt), step(other, kjt))
    monkeypatch.setattr(row_cache.torch, "cat", full)
    for _ in range(3):
        kjt = batch(rng, samples=30)
        other.prefetch(kjt)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert failed
    monkeypatch.undo()
    assert_same(plain, other)


def test_empty_batches_and_many_forwards_without_backward() -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15)
    rng = random.Random(19)
    for _ in range(20):
        output(other, batch(rng))
    for kjt in (batch(rng, samples=0), batch(rng, most=1)):
        assert torch.equal(step(plain, kjt), step(other, kjt))
    _goes_on_alike(plain, other, rng)


def test_a_prefetched_batch_that_is_never_used_holds_its_own_rows_and_no_others() -> None:
    plain, other, rng = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15), random.Random(30)
    other.prefetch(batch(rng))
    for _ in range(40):
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert [own.conflict_misses for own in other.cache_stats().values()] == [0, 0, 0]
    assert_same(plain, other)


def test_weights_of_samples_of_frozen_tables_leave_no_batch_in_flight() -> None:
    module, rng = cache_tables(ebc(None, weighted=True), 0.15), random.Random(31)
    module.requires_grad_(False)
    for _ in range(3):
        kjt = batch(rng, weighted=True)
        kjt.weights().requires_grad_()
        step(module, kjt)
    assert all(not rows.cache.in_flight for _, rows in iter_table_rows(module))


def test_ids_that_an_array_changes_after_the_prefetch_are_asked_for_anew() -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15)
    array = torch.tensor([1, 2, 3] * 7).numpy()

    def kjt() -> KeyedJaggedTensor:
        return KeyedJaggedTensor.from_lengths_sync(KEYS, torch.from_numpy(array), torch.ones(21).long())

    ahead = kjt()
    other.prefetch(ahead)
    array[:] = 70
    assert torch.equal(step(plain, kjt()), step(other, ahead))
    assert_same(plain, other)
    ahead = kjt()
    other.prefetch(ahead)
    array[2] = 300
    with pytest.raises(InputError, match=r"Table 'a': got id 300 of feature 'f' \(position 2"):
        other(ahead)
    _goes_on_alike(plain, other, random.Random(32))


def test_lines_that_an_evaluation_adds_for_ids_that_an_array_changed_are_trained_on() -> None:
    plain, other = ebc(Adam(0.1)), _spare_only(ebc(Adam(0.1)))
    array = torch.arange(40).remainder(3).numpy()
    kjt = KeyedJaggedTensor.from_lengths_sync(KEYS, torch.from_numpy(array), torch.tensor([40, 0, 0]))
    other.prefetch(kjt)
    array[:] = range(40)  # more rows than there are lines
    with torch.inference_mode():
        assert torch.equal(output(plain, kjt), output(other, kjt))
    assert torch.equal(step(plain, kjt), step(other, kjt))
    _goes_on_alike(plain, other, random.Random(45))


class _RaisesAfter(TorchDispatchMode):
    """Ctrl-C after so many of torch's calls."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return out


def test_an_interrupt_anywhere_in_a_prefetch_loses_no_row() -> None:
    tables = [EmbeddingBagConfig(120, 4, "t", feature_names=["f"])]

    def kjt(seed: int, ids: int) -> KeyedJaggedTensor:
        own = torch.randint(120, (ids,), generator=torch.Generator().manual_seed(seed))
        return KeyedJaggedTensor.from_lengths_sync(["f"], own, torch.tensor([ids]))

    def trained() -> EmbeddingBagCollection:
        torch.manual_seed(3)
        module = EmbeddingBagCollection(tables)
        apply_optimizer_in_backward(SGD(0.1, momentum=0.9), module.parameters())
        return module

    plain, base = trained(), cache_tables(trained(), 0.2)
    for seed in range(3):
        step(plain, kjt(seed, 60))
    for calls in range(1, 1000):
        other = copy.deepcopy(base)
        for seed in range(3):
            step(other, kjt(seed, 60))
        try:
            with _RaisesAfter(calls):
                other.prefetch(kjt(3, 60))
                flush_caches(other)
        except KeyboardInterrupt:
            assert_same(plain, other)
            copy.deepcopy(other)
            assert torch.equal(output(plain, kjt(4, 9)), output(other, kjt(4, 9)))
        else:
            break
    assert 20 < calls < 999


def test_an_interrupt_after_the_update_leaves_no_row_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, other, rng = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), 0.15), random.Random(33)
    kjt = batch(rng)
    step(plain, kjt)
    out = output(other, kjt)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BatchesInFlight, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            (out * out).sum().backward()
    assert torch.equal(plain.embedding_bags["a"].weight, other.embedding_bags["a"].weight)


@pytest.mark.parametrize("load_factor", [0.05, 0.5])
def test_another_thread_may_prefetch_meanwhile(load_factor: float) -> None:
    plain, other = ebc(Adam(0.1)), cache_tables(ebc(Adam(0.1)), load_factor)
    rng, failed = random.Random(34), []
    batches = [batch(rng, samples=40) for _ in range(60)]

    def loader() -> None:
        try:
            for kjt in batches:
                other.prefetch(kjt)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=loader)
    thread.start()
    outs = [step(other, kjt) for kjt in batches]
    thread.join()
    assert not failed
    for kjt, out in zip(batches, outs, strict=True):
        assert torch.equal(step(plain, kjt), out)
    assert_same(plain, other)


def test_export_is_refused_with_the_way_out() -> None:
    module, kjt = cache_tables(ebc(SGD(0.1)), 0.2), batch(random.Random(35))

    class Whole(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
            return self.inner(KeyedJaggedTensor(KEYS, values, lengths=lengths)).values()

    args = (kjt.values(), kjt.lengths())
    with pytest.raises(ConfigError, match=r"uncache_tables\(copy\.deepcopy\(module\)\)"):
        torch.export.export(Whole(module), args, strict=False)
    program = torch.export.export(Whole(uncache_tables(copy.deepcopy(module))), args, strict=False)
    assert torch.equal(program.module()(*args), output(module, kjt))


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
