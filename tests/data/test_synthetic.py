"""The planted stream: a function of the row number, with the stated distribution and the stated best AUC."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilerec.data.batch import Batch
from tilerec.data.power_law import power_law_probabilities, scattered_ids
from tilerec.data.synthetic import BLOCK_ROWS, PowerLawFeature, SyntheticClicks
from tilerec.errors import ConfigError

FEATURES = (
    PowerLawFeature("a", 50, 1.2),
    PowerLawFeature("b", 7, 0.0, 0, 3),
    PowerLawFeature("c", 10**6, 1.0, 2, 2),
)


def _joined(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Labels, dense features, and the ids of every (feature, sample), features first."""
    bags: list[list[int]] = []
    for name in (feature.name for feature in FEATURES):
        for batch in batches:
            feature = batch.sparse_features[name]
            bags += [part.tolist() for part in feature.values().split(feature.lengths().tolist())]
    return (
        torch.cat([batch.labels for batch in batches]),
        torch.cat([batch.dense_features for batch in batches]),
        bags,
    )


def _same(one: list[Batch], other: list[Batch]) -> bool:
    (a, b, c), (x, y, z) = _joined(one), _joined(other)
    return torch.equal(a, x) and torch.equal(b, y) and c == z


@pytest.mark.parametrize("batch_size", [1, 37, 512, BLOCK_ROWS, 1500, 4000])
def test_the_stream_does_not_depend_on_the_batch_size(batch_size: int) -> None:
    data = SyntheticClicks(FEATURES, train_rows=2500 if batch_size > 1 else 30, held_out_rows=100)
    rows = 2500 if batch_size > 1 else 30
    assert _same(list(data.train(batch_size)), [data.batch(0, rows)])


def test_any_row_can_be_read_at_any_time_in_any_order() -> None:
    data = SyntheticClicks(FEATURES)
    forward = [data.batch(start, 300) for start in (0, 300, 600, 900, 1200)]
    backward = [SyntheticClicks(FEATURES).batch(start, 300) for start in (1200, 900, 600, 300, 0)][::-1]
    assert _same(forward, backward)
    assert _same([data.batch(10**12, 5)], [data.batch(10**12 - 3, 20)]) is False
    far = data.batch(10**12 - 3, 20)
    assert torch.equal(far.labels[3:8], data.batch(10**12, 5).labels)


def test_epochs_continue_the_stream_and_the_held_out_part_is_another() -> None:
    data = SyntheticClicks(FEATURES, train_rows=700, held_out_rows=700)
    assert _same(list(data.train(250, epoch=2)), [data.batch(1400, 700)])
    assert not _same(list(data.held_out(700)), [data.batch(0, 700)])
    assert _same(list(data.held_out(700)), list(data.held_out(33)))


def test_seeds_give_other_rows_and_another_planted_model() -> None:
    one, other = (SyntheticClicks(FEATURES, seed=seed).batch(0, 200) for seed in (1, 2))
    assert not _same([one], [other])


def test_ids_follow_the_power_law_and_lengths_their_range() -> None:
    data = SyntheticClicks(FEATURES)
    batch = data.batch(0, 20 * BLOCK_ROWS)
    a, b, c = (batch.sparse_features[name] for name in ("a", "b", "c"))
    stated = np.zeros(50)
    stated[scattered_ids(np.arange(50), 50)] = power_law_probabilities(50, 1.2)
    counted = np.bincount(a.values().numpy(), minlength=50) / a.values().numel()
    np.testing.assert_allclose(counted, stated, atol=4 * 0.5 / a.values().numel() ** 0.5)
    assert torch.bincount(b.lengths().long()).div(b.lengths().numel()).tolist() == pytest.approx([0.25] * 4, abs=0.02)
    assert c.lengths().unique().tolist() == [2]
    assert int(c.values().max()) < 10**6


def _planted_logit(data: SyntheticClicks, batch: Batch) -> np.ndarray:
    """The formula of the file's head, from a batch alone, pair by pair."""
    from tilerec.data import synthetic

    count = batch.batch_size
    names = [feature.name for feature in data.sparse_features]
    dense_weights = synthetic._normals(synthetic._keys(0, len(names), np.arange(4)), 1)[0]
    logits = -1.5 + 0.5 / 2 * batch.dense_features.double().numpy() @ dense_weights
    pooled = np.zeros((len(names), count, 5))
    for table, name in enumerate(names):
        feature = batch.sparse_features[name]
        for sample, ids in enumerate(feature.values().split(feature.lengths().tolist())):
            for item in ids.tolist():
                effect = synthetic._normals(synthetic._keys(0, table, np.array([item])), 5)[:, 0]
                pooled[table, sample] += effect / len(ids)
    logits += 1.0 / np.sqrt(len(names)) * pooled[:, :, 0].sum(0)
    pairs = sum(
        (pooled[f, :, 1:] * pooled[g, :, 1:]).sum(1) for f in range(len(names)) for g in range(f + 1, len(names))
    )
    return logits + 0.5 / np.sqrt(len(names) * (len(names) - 1) / 2 * 4) * pairs


def test_probabilities_are_those_of_the_stated_formula() -> None:
    data = SyntheticClicks(FEATURES)
    batch = data.batch(5, 60)
    expected = 1 / (1 + np.exp(-_planted_logit(data, batch)))
    np.testing.assert_allclose(data.probabilities(5, 60).numpy(), expected, rtol=1e-5)


def test_labels_are_clicks_at_the_planted_probabilities() -> None:
    data = SyntheticClicks(FEATURES, held_out_rows=40_000)
    probabilities = data.best_predictions()
    assert probabilities is not None
    labels = torch.cat([batch.labels for batch in data.held_out(5000)]).double()
    assert len(labels) == len(probabilities) == 40_000
    for low, high in ((0.0, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, 1.0)):
        chosen = (probabilities >= low) & (probabilities < high)
        spread = (probabilities[chosen] * (1 - probabilities[chosen])).sum().sqrt() / chosen.sum()
        assert abs(labels[chosen].mean() - probabilities[chosen].mean()) < 4 * spread


def test_the_parts_of_the_logit_have_about_the_stated_strength() -> None:
    one_id = [PowerLawFeature(f"f{index}", 10**6, 0.0) for index in range(6)]
    for scales in ((2.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.0, 0.0, 2.0)):
        dense, main, pair = scales
        data = SyntheticClicks(one_id, num_dense=400, bias=0.0, dense_scale=dense, main_scale=main, pair_scale=pair)
        assert data.probabilities(0, 4096).logit().std().item() == pytest.approx(2.0, rel=0.15)


def test_a_batch_of_no_rows_keeps_its_shape() -> None:
    batch = SyntheticClicks(FEATURES).batch(7, 0)
    assert batch.dense_features.shape == (0, 4)
    assert batch.sparse_features.stride() == 0
    assert list(batch.sparse_features.keys()) == ["a", "b", "c"]


def test_no_dense_features_and_one_table_will_do() -> None:
    batch = SyntheticClicks(FEATURES[:1], num_dense=0).batch(0, 9)
    assert batch.dense_features.shape == (9, 0)
    assert batch.labels.shape == (9,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SyntheticClicks([]), "expected at least one, each name once"),
        (lambda: SyntheticClicks([FEATURES[0], FEATURES[0]]), "each name once"),
        (lambda: SyntheticClicks(FEATURES, train_rows=0), "train_rows=0"),
        (lambda: SyntheticClicks(FEATURES, seed=-1), "got seed=-1"),
        (lambda: SyntheticClicks(FEATURES).batch(-1, 3), r"rows \[-1, -1 \+ 3\)"),
        (lambda: list(SyntheticClicks(FEATURES).train(0)), "batch_size: got 0"),
        (lambda: PowerLawFeature("a", 0), "num_rows: got 0"),
        (lambda: PowerLawFeature("a", 5, 1.0, 3, 2), "got min_length=3 and max_length=2"),
    ],
)
def test_wrong_settings_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
