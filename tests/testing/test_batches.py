"""Random batches are what was asked for; a global batch holds its local ones, feature by feature, rank by rank.

Legend: F features, B samples, R ranks.
"""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tilerec.errors import InputError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.batches import concat_batches, random_batch, split_batch

KEYS = ["a", "b", "c"]


def bags(batch: KeyedJaggedTensor, key: str) -> list[list[tuple[int, float]]]:
    """A feature's bags as (id, weight) pairs, written without the library's own cuts."""
    k = batch.keys().index(key)
    counts = batch.stride_per_key()
    lengths = batch.lengths().tolist()
    first = sum(counts[:k])
    begin = sum(lengths[:first])
    weights = batch.weights_or_none()
    found = []
    for length in lengths[first : first + counts[k]]:
        ids = batch.values()[begin : begin + length].tolist()
        own = weights[begin : begin + length].tolist() if weights is not None else [1.0] * length
        found.append(list(zip(ids, own, strict=True)))
        begin += length
    return found


def samples(batch: KeyedJaggedTensor, key: str) -> list[list[tuple[int, float]]]:
    """As above, per sample: through the inverse indices, if there are any."""
    own = bags(batch, key)
    inverse = batch.inverse_indices_or_none()
    if inverse is None:
        return own
    return [own[i] for i in inverse[1][inverse[0].index(key)].tolist()]


def same(one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> None:
    """Two batches are alike in everything that a module reads."""
    assert one.keys() == other.keys()
    for mine, theirs in ((one.values(), other.values()), (one.lengths(), other.lengths())):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert (one.weights_or_none() is None) == (other.weights_or_none() is None)
    if one.weights_or_none() is not None:
        assert torch.equal(one.weights(), other.weights())
    assert one.stride_per_key_per_rank() == other.stride_per_key_per_rank()
    if one.inverse_indices_or_none() is not None:
        assert one.inverse_indices()[0] == other.inverse_indices()[0]
        assert torch.equal(one.inverse_indices()[1], other.inverse_indices()[1])


# -- random_batch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", [False, True])
def test_the_same_arguments_give_the_same_batch_and_other_seeds_others(variable: bool) -> None:
    first = random_batch(KEYS, 100, 16, weighted=True, variable=variable, seed=3)
    torch.manual_seed(1234)
    same(first, random_batch(KEYS, 100, 16, weighted=True, variable=variable, seed=3))
    assert not torch.equal(first.lengths(), random_batch(KEYS, 100, 16, variable=variable, seed=4).lengths())


def test_lengths_and_empty_bags_are_as_asked_on_average() -> None:
    for mean, empty in ((3.0, 0.2), (0.5, 0.5), (10.0, 0.0), (1.0, 0.0)):
        lengths = random_batch(["a"], 50, 20_000, mean_length=mean, empty=empty).lengths().double()
        assert float(lengths.mean()) == pytest.approx(mean, rel=0.05)
        assert float((lengths == 0).double().mean()) == pytest.approx(empty, abs=0.02)
    assert random_batch(["a"], 0, 50, empty=1.0).values().numel() == 0


def test_ids_fill_their_tables_and_no_more() -> None:
    for rows in ({"a": 1, "b": 7, "c": 300}, [1, 7, 300]):
        batch = random_batch(KEYS, rows, 2000)
        for key, count in zip(KEYS, (1, 7, 300), strict=True):
            ids = batch[key].values()
            assert sorted(set(ids.tolist())) == list(range(count))


def test_a_power_law_has_a_head_and_stays_in_the_table() -> None:
    ids = random_batch(["a"], 1000, 20_000, exponent=1.2).values()
    counts = torch.bincount(ids, minlength=1000)
    assert len(counts) == 1000
    uniform = torch.bincount(random_batch(["a"], 1000, 20_000).values(), minlength=1000)
    assert counts.max() > 20 * uniform.max()
    assert (counts > 0).sum() < (uniform > 0).sum()


@pytest.mark.parametrize("values_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64], ids=str)
def test_dtypes_are_those_asked_for(values_dtype: torch.dtype, lengths_dtype: torch.dtype) -> None:
    batch = random_batch(KEYS, 9, 4, weighted=True, values_dtype=values_dtype, lengths_dtype=lengths_dtype)
    assert (batch.values().dtype, batch.lengths().dtype) == (values_dtype, lengths_dtype)
    assert batch.weights().dtype == torch.float32


def test_a_variable_batch_has_bags_for_every_sample() -> None:
    batch = random_batch(KEYS, 9, 12, variable=True, seed=1)
    assert batch.stride() == 12
    assert batch.variable_stride_per_key()
    assert len(set(batch.stride_per_key())) > 1
    assert all(1 <= count <= 12 for count in batch.stride_per_key())
    names, index_FB = batch.inverse_indices()
    assert (names, tuple(index_FB.shape)) == (KEYS, (3, 12))
    for row, count in zip(index_FB, batch.stride_per_key(), strict=True):
        assert int(row.min()) >= 0
        assert int(row.max()) < count


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize(("keys", "size"), [([], 3), (KEYS, 0), ([], 0), (["a"], 1)])
def test_batches_without_features_or_samples_are_batches(keys: list[str], size: int, variable: bool) -> None:
    batch = random_batch(keys, 5, size, variable=variable, weighted=True)
    assert batch.keys() == keys
    assert batch.lengths().numel() == sum(batch.stride_per_key())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rows": [1, 2]}, "3 keys, rows for 2"),
        ({"batch_size": -1}, "batch_size -1"),
        ({"empty": 1.5}, "empty 1.5"),
        ({"mean_length": 0.5}, "expected 0.8 or more"),
        ({"rows": [5, 0, 5]}, "feature 'b' has 0 rows to draw from"),
    ],
    ids=str,
)
def test_what_cannot_be_drawn_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        random_batch(KEYS, **{"rows": 5, "batch_size": 8, **arguments})  # type: ignore[arg-type]


# -- concat_batches and split_batch ------------------------------------------------------------------------------


def test_the_picture_at_the_top_of_the_file_holds() -> None:
    local = [
        KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 2, 0, 1])),
        KeyedJaggedTensor(["a", "b"], torch.tensor([5, 6]), lengths=torch.tensor([1, 1])),
        KeyedJaggedTensor(["a", "b"], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64)),
    ]
    batch = concat_batches(local)
    assert batch.values().tolist() == [1, 2, 3, 5, 4, 6]
    assert batch.lengths().tolist() == [1, 2, 1, 0, 1, 1]
    for one, other in zip(split_batch(batch, [2, 1, 0]), local, strict=True):
        same(one, other)


batches_of_ranks = st.builds(
    lambda keys, sizes, weighted, variable, dtypes, seed: [
        random_batch(
            keys,
            11,
            size,
            mean_length=1.5,
            empty=0.4,
            weighted=weighted,
            variable=variable,
            values_dtype=dtypes[0],
            lengths_dtype=dtypes[1],
            seed=seed + rank,
        )
        for rank, size in enumerate(sizes)
    ],
    st.sampled_from([["a"], ["a", "b"], ["c", "a", "b"]]),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(torch.int64, torch.int32), (torch.int32, torch.int64)]),
    st.integers(0, 100),
)


@hypothesis.given(batches_of_ranks)
def test_each_feature_of_a_global_batch_is_the_ranks_one_after_the_other(
    local: list[KeyedJaggedTensor],
) -> None:
    batch = concat_batches(local)
    assert batch.keys() == local[0].keys()
    assert batch.stride() == sum(one.stride() for one in local)
    for key in batch.keys():  # noqa: SIM118
        assert samples(batch, key) == [bag for one in local for bag in samples(one, key)]
        assert bags(batch, key) == [bag for one in local for bag in bags(one, key)]


@hypothesis.given(batches_of_ranks)
def test_a_global_batch_is_cut_into_the_local_ones_again(local: list[KeyedJaggedTensor]) -> None:
    parts = split_batch(concat_batches(local), [one.stride() for one in local])
    for one, part in zip(local, parts, strict=True):
        same(part, one)


@hypothesis.given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans(), st.integers(0, 50))
def test_parts_of_any_batch_make_it_whole_again(sizes: list[int], weighted: bool, seed: int) -> None:
    batch = random_batch(KEYS, 9, sum(sizes), weighted=weighted, seed=seed)
    parts = split_batch(batch, sizes)
    assert [part.stride() for part in parts] == sizes
    same(concat_batches(parts), batch)


@pytest.mark.parametrize("variable", [False, True])
def test_a_module_sees_the_same_rows_in_parts_as_in_the_whole(variable: bool) -> None:
    module = EmbeddingBagCollection(
        [EmbeddingBagConfig(9, 3, f"t{key}", feature_names=[key]) for key in KEYS], is_weighted=True
    )
    sizes = [4, 0, 1, 3]
    local = [
        random_batch(KEYS, 9, size, weighted=True, variable=variable, seed=rank) for rank, size in enumerate(sizes)
    ]
    whole = module(concat_batches(local)).values()
    torch.testing.assert_close(whole, torch.cat([module(one).values() for one in local]), rtol=0.0, atol=0.0)


def test_a_variable_batch_of_one_column_cannot_be_cut_for_several_ranks() -> None:
    batch = random_batch(KEYS, 9, 6, variable=True)
    same(split_batch(batch, [6])[0], batch)
    with pytest.raises(InputError, match="a variable batch from 1 ranks cannot be split for 2"):
        split_batch(batch, [3, 3])


def test_sizes_must_sum_to_the_batch() -> None:
    batch = random_batch(KEYS, 9, 6)
    for sizes in ([3, 2], [7, -1], []):
        with pytest.raises(InputError, match="for a batch of 6; expected sizes >= 0 with that sum"):
            split_batch(batch, sizes)


def test_batches_of_other_kinds_do_not_make_one() -> None:
    plain = random_batch(KEYS, 9, 6)
    for other in (
        random_batch(["b", "a", "c"], 9, 6),
        random_batch(KEYS[:2], 9, 6),
        random_batch(KEYS, 9, 6, weighted=True),
        random_batch(KEYS, 9, 6, variable=True),
    ):
        with pytest.raises(InputError, match=r"batch 1 has keys .*expected batches of one kind"):
            concat_batches([plain, other])
    with pytest.raises(InputError, match="the list is empty"):
        concat_batches([])


def test_weights_keep_their_graph() -> None:
    local = [random_batch(["a"], 9, 4, weighted=True, seed=seed) for seed in range(2)]
    for one in local:
        one.weights().requires_grad_()
    (concat_batches(local).weights() * 3).sum().backward()
    for one in local:
        assert one.weights().grad is not None
        assert (one.weights().grad == 3).all()
