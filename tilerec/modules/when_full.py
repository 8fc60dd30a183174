"""What a table does when a bucket is full: evict, let the id share a row, or drop it."""

from __future__ import annotations

from typing import Literal, get_args

from tilerec.errors import ConfigError
from tilerec.modules.evict import Evicting

WhenFull = Literal["evict", "fallback", "reject"]


def read_when_full(
    who: str,
    when_full: WhenFull | None,
    evicting: Evicting | None,
    disable_fallback: bool,
    always: bool = False,
) -> tuple[Evicting | None, bool]:
    """Who is evicted, and whether ids without a row share one. `always`: the caller must name a policy."""
    if when_full is not None and when_full not in get_args(WhenFull):
        raise ConfigError(f"{who}: when_full={when_full!r} is none of {list(get_args(WhenFull))}.")
    if when_full == "evict" and evicting is None:
        raise ConfigError(f"{who}: when_full='evict' needs a policy; give eviction_policy_name.")
    if when_full == "fallback" and disable_fallback:
        raise ConfigError(
            f"{who}: when_full='fallback' and disable_fallback=True contradict each other; keep one."
        )
    if when_full in ("fallback", "reject") and evicting is not None and not always:
        raise ConfigError(
            f"{who}: when_full='{when_full}' evicts nobody, and an eviction policy is given; keep one of them."
        )
    shares = not (disable_fallback or when_full == "reject")
    return (evicting if when_full in (None, "evict") else None), shares
