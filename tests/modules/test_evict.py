"""Eviction policies: what names and numbers they take."""

from __future__ import annotations

import pytest

from tilerec.errors import ConfigError
from tilerec.modules.evict import (
    DistanceLFU_EvictionPolicy,
    Evicting,
    HashZchEvictionConfig,
    HashZchEvictionPolicyName,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    read_eviction,
)
from tilerec.ops.hash.definition import Policy

NAMES = HashZchEvictionPolicyName


def test_the_three_policies_of_mch_say_what_the_ops_take() -> None:
    assert LFU_EvictionPolicy().evicting == Evicting(Policy.LFU)
    assert LRU_EvictionPolicy(decay_exponent=3.0).evicting == Evicting(Policy.LRU)
    assert DistanceLFU_EvictionPolicy(2).evicting == Evicting(Policy.DISTANCE_LFU, 2.0)


@pytest.mark.parametrize("policy", [LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy])
def test_a_filter_of_counts_is_refused_with_what_to_use_instead(policy: type) -> None:
    with pytest.raises(ConfigError, match=r"threshold_filtering_func.*admission_threshold"):
        policy(threshold_filtering_func=lambda counts: (counts > 1, 1.0))


def test_an_exponent_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="decay_exponent=-1"):
        DistanceLFU_EvictionPolicy(-1.0)


def test_names_with_their_configs_become_policies() -> None:
    one = HashZchEvictionConfig(["a", "b"], single_ttl=5)
    each = HashZchEvictionConfig(["a", "b"], per_feature_ttl=[5, 7])
    assert read_eviction(None, None, "t") is None
    assert read_eviction(NAMES.SINGLE_TTL_EVICTION, one, "t") == Evicting(Policy.TTL, ttl=5)
    made = read_eviction("per_feature_ttl_eviction", each, "t")
    assert made is not None
    assert made.ttls(["b", "a", "c"]) == [7, 5, 0]
    assert read_eviction(NAMES.LRU_EVICTION, None, "t") == Evicting(Policy.LRU)
    assert read_eviction("LFU_EVICTION", None, "t") == Evicting(Policy.LFU)
    assert read_eviction("DISTANCE_LFU_EVICTION", None, "t") == Evicting(Policy.DISTANCE_LFU)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("FIFO", None, "eviction_policy_name='FIFO'; expected one of"),
        (None, HashZchEvictionConfig(["a"], 5), "without eviction_policy_name"),
        ("SINGLE_TTL_EVICTION", None, "needs eviction_config with a single_ttl"),
        ("SINGLE_TTL_EVICTION", HashZchEvictionConfig(["a"], 5, [5]), "Leave it out"),
        ("PER_FEATURE_TTL_EVICTION", HashZchEvictionConfig(["a"], 5), "needs eviction_config with a per_feature_ttl"),
        ("PER_FEATURE_TTL_EVICTION", HashZchEvictionConfig(["a"], 5, [5]), "Leave it out"),
        ("PER_FEATURE_TTL_EVICTION", HashZchEvictionConfig(["a", "b"], None, [5]), "1 entries .* expected 2"),
        ("SINGLE_TTL_EVICTION", HashZchEvictionConfig(["a"], -5), "a time to live of -5"),
        ("LRU_EVICTION", HashZchEvictionConfig(["a"], 5), "does not read"),
    ],
)  # fmt: skip
def test_contradictions_are_named(name: str | None, config: HashZchEvictionConfig | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_eviction(name, config, "Table 't'")
