"""`HashZchManagedCollisionModule`: TorchRec's arguments, those without effect, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tilerec.errors import ConfigError
from tilerec.modules.hash_zch import HashZchManagedCollisionModule


def test_768_buckets_unless_told_otherwise() -> None:
    module = HashZchManagedCollisionModule(7680)
    assert (module.buckets(), module.output_size(), module._buckets.slots) == (768, 7680, 9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output_segments": [0, 8]}, "output_segments"),
        ({"tb_logging_frequency": 5}, "tb_logging_frequency"),
        ({"input_hash_size": 1000}, "input_hash_size"),
        ({"persist_hash_zch_bucket": False}, "persist_hash_zch_bucket"),
        ({"track_id_freq": True, "no_bag": True}, "track_id_freq.*no_bag"),
    ],
)
def test_arguments_without_effect_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=f"got settings without effect: .*{words}") as caught:
        HashZchManagedCollisionModule(8, "cpu", 2, **options)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"opt_in_prob": 30}, "opt_in_prob=30.*admission_threshold"),
        ({"write_runtime_meta_dim": 4}, "write_runtime_meta_dim=4"),
        ({"total_num_buckets": 3}, "got 8 rows in 3 buckets"),
        ({"start_bucket": 2}, r"got buckets \[2, 2\) of 2"),
        ({"percent_reserved_slots": 100}, "percent_reserved_slots=100"),
        ({"when_full": "explode"}, "when_full='explode'; expected one of"),
        ({"when_full": "evict"}, "when_full='evict' without a policy"),
        ({"when_full": "fallback", "disable_fallback": True}, "contradict each other"),
        ({"when_full": "reject", "eviction_policy_name": "LRU_EVICTION"}, "evicts no rows"),
        ({"max_probe": 0}, "max_probe=0"),
        ({"admission_threshold": 0}, "admission_threshold=0"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HashZchManagedCollisionModule(8, "cpu", **{"total_num_buckets": 2, **options})


def test_buckets_too_small_to_fill_evenly_are_warned_about() -> None:
    with pytest.warns(UserWarning, match="768 buckets of 2 rows; buckets this small overflow"):
        HashZchManagedCollisionModule(1536)


def test_it_says_what_it_is() -> None:
    text = repr(HashZchManagedCollisionModule(8, "cpu", 2, eviction_policy_name="LRU_EVICTION"))
    assert "8 rows, 2 buckets, LRU, ids without a row share a row" in text
