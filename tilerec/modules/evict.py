"""Eviction policies of managed collision: the choice of the row that a new id takes when its bucket is full.

Nouns
  policy    scores the rows in a new id's probe window; the lowest is evicted, and of equals the first in probe order
  interval  number of steps between steps with evictions; in the others, a full bucket accepts no new id
  ttl       time to live: how long an id keeps its row after its last use, by the table's clock; then any id may take it

A row that a sample of the current step uses is never evicted in that step, at any score.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, final

from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.hash.definition import Policy


@dataclass(frozen=True)
class Evicting:
    """A policy with its parameters, in the form that the hash ops take.

    Args:
        exponent: of the distance, for DISTANCE_LFU.
        ttl: time to live of ids of every feature, for TTL.
        ttl_of: (feature, time to live) pairs; other features have `ttl`.
    """

    policy: Policy
    exponent: float = 1.0
    ttl: int = 0
    ttl_of: tuple[tuple[str, int], ...] = ()

    def ttls(self, features: Sequence[str]) -> list[int]:
        """Return the time to live of each feature's ids."""
        own = dict(self.ttl_of)
        return [own.get(feature, self.ttl) for feature in features]


Admission = Callable[[Tensor], Tensor]
"""Takes the ids of a training step that this rank holds [N]; returns those that may get a row, bool [N]."""


class MCHEvictionPolicy(ABC):
    """A policy of `MCHManagedCollisionModule` (abstract; see the three below)."""

    @property
    @abstractmethod
    def evicting(self) -> Evicting:
        """The policy in the form that the hash ops take."""

    def admission(self, interval: int) -> Admission | None:
        """Return a new filter of a module's ids, which sees every training step; None admits all ids.

        Args:
            interval: steps between steps with evictions.
        """
        return None


@final
class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Least frequently used: evicts the row with the fewest uses; of equals, the least recently used one.

    Args:
        threshold_filtering_func: not supported; any value but None raises. It filters by the counts of a history that
            one rank would have to hold. Use `admission_threshold` of the module, which counts each id in its bucket, or
            the policy of `tilerec.compat.eviction`, which filters the ids of each rank.
    """

    def __init__(self, threshold_filtering_func: Callable[..., Any] | None = None) -> None:
        _no_filter(type(self).__name__, threshold_filtering_func)

    @property
    def evicting(self) -> Evicting:
        return Evicting(Policy.LFU)


@final
class LRU_EvictionPolicy(MCHEvictionPolicy):
    """Least recently used: evicts the row whose last use is oldest.

    Args:
        decay_exponent: accepted without effect; every exponent gives the same order of ages.
        threshold_filtering_func: not supported; see `LFU_EvictionPolicy`.
    """

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Callable[..., Any] | None = None) -> None:
        _exponent(type(self).__name__, decay_exponent)
        _no_filter(type(self).__name__, threshold_filtering_func)

    @property
    def evicting(self) -> Evicting:
        return Evicting(Policy.LRU)


@final
class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """Evicts the row with the lowest `uses / (steps since its last use) ** decay_exponent`.

    Args:
        decay_exponent: weight of the age; 0 is LFU.
        threshold_filtering_func: not supported; see `LFU_EvictionPolicy`.
    """

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Callable[..., Any] | None = None) -> None:
        self._exponent = _exponent(type(self).__name__, decay_exponent)
        _no_filter(type(self).__name__, threshold_filtering_func)

    @property
    def evicting(self) -> Evicting:
        return Evicting(Policy.DISTANCE_LFU, self._exponent)


class HashZchEvictionPolicyName(Enum):
    """Policies of `HashZchManagedCollisionModule`, which also accepts their names as strings."""

    SINGLE_TTL_EVICTION = "SINGLE_TTL_EVICTION"
    PER_FEATURE_TTL_EVICTION = "PER_FEATURE_TTL_EVICTION"
    LRU_EVICTION = "LRU_EVICTION"
    LFU_EVICTION = "LFU_EVICTION"
    DISTANCE_LFU_EVICTION = "DISTANCE_LFU_EVICTION"


@final
@dataclass(frozen=True)
class HashZchEvictionConfig:
    """Times to live of ids.

    Args:
        features: the table's features, in the order of `per_feature_ttl`.
        single_ttl: time to live of every id, in units of the module's clock (hours by default).
        per_feature_ttl: time to live of each feature's ids. An id of several features expires at the latest of the
            ends that its uses give.
    """

    features: Sequence[str]
    single_ttl: int | None = None
    per_feature_ttl: Sequence[int] | None = None


def read_eviction(
    name: HashZchEvictionPolicyName | str | None, config: HashZchEvictionConfig | None, who: str
) -> Evicting | None:
    """Return the policy of a name and its config; None for no name.

    Raises:
        ConfigError: an unknown name, a TTL policy without times, or times without a TTL policy.
    """
    if name is None:
        if config is not None:
            raise ConfigError(
                f"{who}: got eviction_config without eviction_policy_name. Name the policy, or leave the config out."
            )
        return None
    names = HashZchEvictionPolicyName
    if not isinstance(name, names):
        if not isinstance(name, str) or name.upper() not in names.__members__:
            raise ConfigError(f"{who}: got eviction_policy_name={name!r}; expected one of {list(names.__members__)}.")
        name = names[name.upper()]
    if name is names.SINGLE_TTL_EVICTION:
        if config is None or config.single_ttl is None:
            raise ConfigError(f"{who}: {name.value} needs eviction_config with a single_ttl.")
        if config.per_feature_ttl is not None:
            raise ConfigError(
                f"{who}: got {name.value} with a per_feature_ttl. Leave it out, or use PER_FEATURE_TTL_EVICTION."
            )
        return Evicting(Policy.TTL, ttl=_ttl(who, config.single_ttl))
    if name is names.PER_FEATURE_TTL_EVICTION:
        if config is None or config.per_feature_ttl is None:
            raise ConfigError(f"{who}: {name.value} needs eviction_config with a per_feature_ttl.")
        if config.single_ttl is not None:
            raise ConfigError(f"{who}: got {name.value} with a single_ttl. Leave it out, or use SINGLE_TTL_EVICTION.")
        if len(config.per_feature_ttl) != len(config.features):
            raise ConfigError(
                f"{who}: got {len(config.per_feature_ttl)} entries in per_feature_ttl; expected "
                f"{len(config.features)}, one per feature, in the order of features."
            )
        times = [_ttl(who, ttl) for ttl in config.per_feature_ttl]
        return Evicting(Policy.TTL, ttl_of=tuple(zip(config.features, times, strict=True)))
    if config is not None and (config.single_ttl is not None or config.per_feature_ttl is not None):
        raise ConfigError(
            f"{who}: got {name.value} with times to live, which it does not read. Use one of the TTL policies."
        )
    policies = {names.LRU_EVICTION: Policy.LRU, names.LFU_EVICTION: Policy.LFU}
    return Evicting(policies.get(name, Policy.DISTANCE_LFU))


def _ttl(who: str, ttl: int) -> int:
    if isinstance(ttl, bool) or not isinstance(ttl, int) or not 0 <= ttl <= 2**61:
        raise ConfigError(f"{who}: got a time to live of {ttl!r}; expected an integer from 0 to 2**61.")
    return ttl


def _exponent(who: str, exponent: float) -> float:
    if not 0 <= exponent <= 16:
        raise ConfigError(f"{who}: got decay_exponent={exponent}; expected 0 to 16.")
    return float(exponent)


def _no_filter(who: str, function: Callable[..., Any] | None) -> None:
    if function is not None:
        raise ConfigError(
            f"{who}: threshold_filtering_func is not supported: it needs the counts of all new ids, which lie on many "
            "ranks. Leave it out and set admission_threshold=k on the module: an id gets a row at its k-th occurrence. "
            "Or take the policy of tilerec.compat.eviction, which filters the ids of each rank."
        )
