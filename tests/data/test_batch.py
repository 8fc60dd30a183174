from __future__ import annotations

import torch

from tilerec.data.batch import Batch
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def _batch() -> Batch:
    features = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 0, 1]))
    return Batch(torch.ones(2, 3), features, torch.tensor([0.0, 1.0]))


def test_to_moves_every_part_and_shares_what_is_there() -> None:
    batch = _batch()
    moved = batch.to("meta")
    assert moved.dense_features.is_meta
    assert moved.labels.is_meta
    assert moved.sparse_features.values().is_meta
    assert moved.batch_size == 2
    same = batch.to("cpu")
    assert same.dense_features.data_ptr() == batch.dense_features.data_ptr()
    assert same.sparse_features.values().data_ptr() == batch.sparse_features.values().data_ptr()


def test_a_field_can_be_swapped() -> None:
    batch = _batch()
    batch.labels = 1 - batch.labels
    assert batch.labels.tolist() == [1.0, 0.0]


def test_record_stream_reaches_every_part(monkeypatch: object) -> None:
    seen: list[object] = []

    class Recorder:
        def record_stream(self, stream: object) -> None:
            seen.append(stream)

    stream = object()
    Batch(Recorder(), Recorder(), Recorder()).record_stream(stream)  # type: ignore[arg-type]
    assert seen == [stream] * 3
