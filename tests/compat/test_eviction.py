"""TorchRec's eviction policies with filters of new ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilerec.compat.eviction import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    WindowFilter,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from tilerec.modules import MCHManagedCollisionModule
from tilerec.sparse import JaggedTensor

OFTEN, TWICE, ONCE, LATER = 2**40, 7, 8, 9


def test_filters_return_the_ids_that_they_keep() -> None:
    counts = torch.tensor([1, 2, 3, 10, 1, 1])
    assert average_threshold_filter(counts)[0].tolist() == [False, False, False, True, False, False]
    assert not dynamic_threshold_filter(counts)[0].any()
    assert float(dynamic_threshold_filter(counts, 2.0)[1]) == 6.0
    torch.manual_seed(0)  # the draws of TorchRec
    assert probabilistic_threshold_filter(torch.tensor([100, 100, 50, 200]))[0].tolist() == [True, False, True, True]


def _module(policy: Any, interval: int) -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(64, "cpu", policy, interval, buckets=2)


def _step(module: MCHManagedCollisionModule, *ids: int) -> None:
    module({"f": JaggedTensor(torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor([len(ids)]))})


def _known(module: MCHManagedCollisionModule) -> set[int]:
    return set(module.ids[module.id_map.state.used_E].tolist())


@pytest.mark.parametrize("policy", [DistanceLFU_EvictionPolicy, LFU_EvictionPolicy, LRU_EvictionPolicy])
def test_ids_get_a_row_once_they_pass_the_filter_of_their_window(policy: Any) -> None:
    module = _module(policy(threshold_filtering_func=average_threshold_filter), 2)
    _step(module, OFTEN, OFTEN, TWICE, ONCE)
    assert _known(module) == set()  # the first decision is in step 2
    _step(module, OFTEN, TWICE)
    assert _known(module) == {OFTEN}
    _step(module, LATER, OFTEN, TWICE)  # those that have not passed still share a row
    assert _known(module) == {OFTEN}
    _step(module)
    assert _known(module) == {OFTEN}


def test_an_id_that_passed_gets_its_row_at_its_next_use() -> None:
    module = _module(LFU_EvictionPolicy(lambda counts: (counts >= 2, 2)), 2)
    _step(module, TWICE, TWICE, ONCE)
    _step(module, ONCE)
    assert _known(module) == {ONCE}  # both passed; one was in the batch
    _step(module, TWICE)
    assert _known(module) == {ONCE, TWICE}


def test_windows_are_separate_and_evaluation_does_not_count() -> None:
    module = _module(LRU_EvictionPolicy(threshold_filtering_func=lambda counts: (counts >= 2, 2)), 1)
    _step(module, ONCE)
    module.eval()
    _step(module, ONCE)
    module.train()
    _step(module, ONCE)
    assert _known(module) == set()
    _step(module, ONCE, ONCE)
    assert _known(module) == {ONCE}


def test_read_only_features_stay_read_only() -> None:
    module = _module(LFU_EvictionPolicy(lambda counts: (counts > 0, 0)), 1)
    one = JaggedTensor(torch.tensor([TWICE]), lengths=torch.tensor([1]))
    other = JaggedTensor(torch.tensor([LATER]), lengths=torch.tensor([1]))
    module({"f": one, "g_readonly": other})
    assert _known(module) == {TWICE}


def test_a_filter_sees_the_counts_of_all_ids_and_no_filter_admits_all() -> None:
    seen: list[list[int]] = []

    def keep(counts: torch.Tensor) -> tuple[torch.Tensor, int]:
        seen.append(sorted(counts.tolist()))
        return counts > 0, 0

    window = WindowFilter(keep, 3)
    for ids in ([1, 1], [2], [1, 3]):
        kept = window(torch.tensor(ids))
    assert (seen, kept.tolist()) == ([[1, 1, 3]], [True, True])
    assert LFU_EvictionPolicy().admission(3) is None
    module = _module(LFU_EvictionPolicy(), 2)
    _step(module, ONCE)
    assert _known(module) == {ONCE}
