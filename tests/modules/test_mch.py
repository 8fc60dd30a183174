"""`MCHManagedCollisionModule`: TorchRec's arguments, those without effect, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.modules.evict import LFU_EvictionPolicy, LRU_EvictionPolicy
from tilerec.modules.mch import MCHManagedCollisionModule


def test_buckets_are_as_many_as_leave_rows_enough() -> None:
    assert MCHManagedCollisionModule(768 * 100, "cpu", LRU_EvictionPolicy(), 1).buckets() == 768
    assert MCHManagedCollisionModule(16, "cpu", LRU_EvictionPolicy(), 1).buckets() == 1
    assert MCHManagedCollisionModule(16, "cpu", LRU_EvictionPolicy(), 1, buckets=4).buckets() == 4


def test_ids_pass_the_users_function_first() -> None:
    def folded(ids: Tensor, size: int) -> Tensor:
        return ids % size

    module = MCHManagedCollisionModule(16, "cpu", LFU_EvictionPolicy(), 1, 10, folded)
    assert module.input_size() == 10
    assert module.id_map.hashed(torch.tensor([13, -1])).tolist() == [3, 9]
    wrong = MCHManagedCollisionModule(16, "cpu", LFU_EvictionPolicy(), 1, 10, lambda ids, size: ids.float())
    with pytest.raises(InputError, match=r"input_hash_func returned torch\.float32"):
        wrong.id_map.hashed(torch.tensor([13]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mch_size": 100}, "mch_size and mch_hash_func.*percent_reserved_slots"),
        ({"output_global_offset": 16}, "output_global_offset=16"),
        ({"eviction_policy": "LRU"}, "got a str as eviction_policy; expected LFU_EvictionPolicy"),
        ({"eviction_interval": 0}, "eviction_interval=0"),
        ({"buckets": 5}, "got 16 rows in 5 buckets"),
        ({"zch_size": 0}, "zch_size=0"),
        ({"zch_size": 1}, "none would be left for own ids"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "zch_size": 16, "device": "cpu", "eviction_policy": LRU_EvictionPolicy(), "eviction_interval": 1, **options,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=words):
        MCHManagedCollisionModule(**given)


def test_segments_are_without_effect_and_named() -> None:
    with pytest.warns(UserWarning, match="output_segments") as caught:
        MCHManagedCollisionModule(16, "cpu", LRU_EvictionPolicy(), 1, output_segments=[0, 16])
    assert caught[0].filename == __file__


def test_it_can_reject_in_place_of_sharing() -> None:
    module = MCHManagedCollisionModule(2, "cpu", LRU_EvictionPolicy(), 1, when_full="reject")
    module.bind("t", ["a"])
    assert -1 in module.map(torch.tensor([1, 2, 3]), [3], 0).rows_N.tolist()
