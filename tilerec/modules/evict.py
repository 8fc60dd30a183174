"""Eviction policies of managed collision: whose row a new id takes when its bucket is full.

Nouns
  policy    scores the rows of a new id's window; the least goes, and of equals the first in the order of probing
  interval  steps between those in which evictions may happen; in the others a full bucket is full
  ttl       how long an id keeps its row after its last use, by the table's clock; then anyone may take it

A row that a sample of this step uses is never evicted in it, whatever its score.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, final

from tilerec.errors import ConfigError
from tilerec.ops.hash.definition import Policy


@dataclass(frozen=True)
class Evicting:
    """A policy with its numbers, as the ops take them.

    Args:
        exponent: of the distance, for DISTANCE_LFU.
        ttl: of ids of every feature, for TTL.
        ttl_of: of single features; others have `ttl`.
    """

    policy: Policy
    exponent: float = 1.0
    ttl: int = 0
    ttl_of: tuple[tuple[str, int], ...] = ()

    def ttls(self, features: Sequence[str]) -> list[int]:
        """Per feature, how long its ids keep their rows."""
        own = dict(self.ttl_of)
        return [own.get(feature, self.ttl) for feature in features]


class MCHEvictionPolicy(ABC):
    """A policy of `MCHManagedCollisionModule` (abstract; see the three below)."""

    @property
    @abstractmethod
    def evicting(self) -> Evicting:
        """As the ops take it."""


@final
class LFU_EvictionPolicy(MCHEvictionPolicy):
    """The row with the fewest uses goes; of equals, the one that was used longest ago.

    Args:
        threshold_filtering_func: refused: it judges counts of a history that one rank would have to hold. Use
            `admission_threshold` of the module, which counts every id where its bucket lies.
    """

    def __init__(self, threshold_filtering_func: Callable[..., Any] | None = None) -> None:
        _no_filter(type(self).__name__, threshold_filtering_func)

    @property
    def evicting(self) -> Evicting:
        return Evicting(Policy.LFU)


@final
class LRU_EvictionPolicy(MCHEvictionPolicy):
    """The row that was used longest ago goes.

    Args:
        decay_exponent: taken; the order of ages is the same under every exponent.
        threshold_filtering_func: refused; see `LFU_EvictionPolicy`.
    """

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: Callable[..., Any] | None = None
    ) -> None:
        _exponent(type(self).__name__, decay_exponent)
        _no_filter(type(self).__name__, threshold_filtering_func)

    @property
    def evicting(self) -> Evicting:
        return Evicting(Policy.LRU)


@final
class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """The row with the least `uses / (steps since its last use) ** decay_exponent` goes.

    Args:
        decay_exponent: 0 is LFU; the larger, the more age counts.
        threshold_filtering_func: refused; see `LFU_EvictionPolicy`.
    """

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: Callable[..., Any] | None = None
    ) -> None:
        self._exponent = _exponent(type(self).__name__, decay_exponent)
        _no_filter(type(self).__name__, threshold_filtering_func)

    @property
    def evicting(self) -> Evicting:
        return Evicting(Policy.DISTANCE_LFU, self._exponent)


class HashZchEvictionPolicyName(Enum):
    """Policies of `HashZchManagedCollisionModule`; its strings are accepted too."""

    SINGLE_TTL_EVICTION = "SINGLE_TTL_EVICTION"
    PER_FEATURE_TTL_EVICTION = "PER_FEATURE_TTL_EVICTION"
    LRU_EVICTION = "LRU_EVICTION"
    LFU_EVICTION = "LFU_EVICTION"
    DISTANCE_LFU_EVICTION = "DISTANCE_LFU_EVICTION"


@final
@dataclass(frozen=True)
class HashZchEvictionConfig:
    """Times to live.

    Args:
        features: those of the table; the order of `per_feature_ttl`.
        single_ttl: of every id, in units of the module's clock (hours, unless it has another).
        per_feature_ttl: of the ids of each feature. An id of several features has the latest end of all its uses.
    """

    features: Sequence[str]
    single_ttl: int | None = None
    per_feature_ttl: Sequence[int] | None = None


def read_eviction(
    name: HashZchEvictionPolicyName | str | None, config: HashZchEvictionConfig | None, who: str
) -> Evicting | None:
    """The policy that a name and its config ask for; None for no name.

    Raises:
        ConfigError: an unknown name, a TTL policy without times, or times without a TTL policy.
    """
    if name is None:
        if config is not None:
            raise ConfigError(
                f"{who}: eviction_config without eviction_policy_name; name the policy, or leave the config out."
            )
        return None
    names = HashZchEvictionPolicyName
    if not isinstance(name, names):
        if not isinstance(name, str) or name.upper() not in names.__members__:
            raise ConfigError(f"{who}: eviction_policy_name={name!r} is none of {list(names.__members__)}.")
        name = names[name.upper()]
    if name is names.SINGLE_TTL_EVICTION:
        if config is None or config.single_ttl is None:
            raise ConfigError(f"{who}: {name.value} needs eviction_config with a single_ttl.")
        if config.per_feature_ttl is not None:
            raise ConfigError(
                f"{who}: {name.value} with a per_feature_ttl; leave it out, or use PER_FEATURE_TTL_EVICTION."
            )
        return Evicting(Policy.TTL, ttl=_ttl(who, config.single_ttl))
    if name is names.PER_FEATURE_TTL_EVICTION:
        if config is None or config.per_feature_ttl is None:
            raise ConfigError(f"{who}: {name.value} needs eviction_config with a per_feature_ttl.")
        if config.single_ttl is not None:
            raise ConfigError(
                f"{who}: {name.value} with a single_ttl; leave it out, or use SINGLE_TTL_EVICTION."
            )
        if len(config.per_feature_ttl) != len(config.features):
            raise ConfigError(
                f"{who}: {len(config.per_feature_ttl)} times in per_feature_ttl for {len(config.features)} features; "
                "give one each, in the order of features."
            )
        times = [_ttl(who, ttl) for ttl in config.per_feature_ttl]
        return Evicting(Policy.TTL, ttl_of=tuple(zip(config.features, times, strict=True)))
    if config is not None and (config.single_ttl is not None or config.per_feature_ttl is not None):
        raise ConfigError(
            f"{who}: {name.value} with times to live, which it does not read; use one of the TTL policies."
        )
    policies = {names.LRU_EVICTION: Policy.LRU, names.LFU_EVICTION: Policy.LFU}
    return Evicting(policies.get(name, Policy.DISTANCE_LFU))


def _ttl(who: str, ttl: int) -> int:
    if isinstance(ttl, bool) or not isinstance(ttl, int) or not 0 <= ttl <= 2**61:
        raise ConfigError(f"{who}: a time to live of {ttl!r}; wanted a whole number from 0 up.")
    return ttl


def _exponent(who: str, exponent: float) -> float:
    if not 0 <= exponent <= 16:
        raise ConfigError(f"{who}: decay_exponent is {exponent}, wanted 0 to 16.")
    return float(exponent)


def _no_filter(who: str, function: Callable[..., Any] | None) -> None:
    if function is not None:
        _refuse_filter(who)


def _refuse_filter(who: str) -> NoReturn:
    raise ConfigError(
        f"{who}: threshold_filtering_func judges the counts of all new ids together, which lie on many ranks; leave it "
        "out and give the module admission_threshold=k: an id gets a row when it comes for the k-th time."
    )
