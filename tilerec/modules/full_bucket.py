"""Policy for a new id whose bucket is full: evict a row, share a row, or drop the id."""

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
    """Return the eviction policy, and whether ids without a row share one.

    Args:
        always: the caller's signature requires a policy, so a policy together with "fallback" or "reject" is allowed.

    Raises:
        ConfigError: an unknown `when_full`, or one that contradicts another argument.
    """
    if when_full is not None and when_full not in get_args(WhenFull):
        raise ConfigError(f"{who}: got when_full={when_full!r}; expected one of {list(get_args(WhenFull))}.")
    if when_full == "evict" and evicting is None:
        raise ConfigError(f"{who}: got when_full='evict' without a policy. Set eviction_policy_name.")
    if when_full == "fallback" and disable_fallback:
        raise ConfigError(f"{who}: when_full='fallback' and disable_fallback=True contradict each other. Keep one.")
    if when_full in ("fallback", "reject") and evicting is not None and not always:
        raise ConfigError(
            f"{who}: when_full='{when_full}' evicts no rows and contradicts the eviction policy. Keep one of them."
        )
    shares = not (disable_fallback or when_full == "reject")
    return (evicting if when_full in (None, "evict") else None), shares
