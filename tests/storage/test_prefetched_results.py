"""What is made of a batch ahead is taken once, by the very batch as it was."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import Tensor

from tilerec.storage.prefetched_results import MAX_RESULTS, PrefetchedResults, Sources

CPU = torch.device("cpu")


def sources(*tensors: Tensor | None, of: int = 0) -> Sources | None:
    return Sources.of(tensors, (of,))


def test_it_is_taken_once_or_stays() -> None:
    ahead, ids, made = PrefetchedResults(), torch.arange(3), [torch.ones(1)]
    ahead.keep(sources(ids, None), made, CPU)
    assert ahead.take(sources(ids, None), stays=True) is made
    assert ahead.take(sources(ids.view(3), None)) is made  # the same memory
    assert not ahead
    assert ahead.take(sources(ids, None)) is None


def test_others_and_what_was_written_to_have_nothing() -> None:
    ahead, ids = PrefetchedResults(), torch.arange(4)
    ahead.keep(sources(ids), [], CPU)
    for other in (
        sources(ids, of=1),
        sources(ids.clone()),
        sources(ids[:3]),
        sources(ids, None),
        sources(ids[::2]),
    ):
        assert ahead.take(other) is None
    assert len(ahead) == 1
    ids.add_(1)
    assert ahead.take(sources(ids)) is None


def test_the_oldest_are_let_go_and_one_of_a_batch_is_kept() -> None:
    ahead, batches = PrefetchedResults(), [torch.arange(2) for _ in range(MAX_RESULTS + 1)]
    for ids in batches:
        ahead.keep(sources(ids), [ids], CPU)
        ahead.keep(sources(ids), [ids + 1], CPU)
    assert len(ahead) == MAX_RESULTS
    assert ahead.take(sources(batches[0])) is None
    found = ahead.take(sources(batches[1]))
    assert found is not None
    assert found[0].tolist() == [1, 2]
    ahead.keep(sources(batches[0]), [], CPU, 1)
    assert len(ahead) == 1


def test_copies_and_files_begin_without() -> None:
    ahead = PrefetchedResults()
    ahead.keep(sources(torch.arange(2)), [], CPU)
    assert not copy.deepcopy(ahead)
    assert not pickle.loads(pickle.dumps(ahead))


def test_tensors_whose_writes_nobody_counts_are_the_source_of_nothing() -> None:
    with torch.inference_mode():
        ids = torch.arange(2)
    assert sources(ids) is None
    ahead = PrefetchedResults()
    ahead.keep(None, [], CPU)
    assert not ahead
