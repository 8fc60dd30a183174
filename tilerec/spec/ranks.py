"""Ranks as text: `"0-7, 12"`. Plans and topologies are read and edited by people; a thousand ranks fit on a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from tilerec.errors import ConfigError


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def ranks_to_text(ranks: Iterable[int]) -> str:
    """Ranks in the given order, runs of successors joined: `(0, 1, 2, 5, 4)` -> `"0-2,5,4"`."""
    if isinstance(ranks, tuple):
        # Thousands of tables lie on the same thousands of ranks.
        return _joined(ranks) if len(ranks) != 1 or ranks[0] < 0 else str(ranks[0])
    return _runs(ranks)


@lru_cache(maxsize=64)
def _joined(ranks: tuple[int, ...]) -> str:
    return _runs(ranks)


def _runs(ranks: Iterable[int]) -> str:
    parts: list[str] = []
    first = last = -2
    for rank in ranks:
        if rank == last + 1 and first >= 0:
            last = rank
            continue
        if first >= 0:
            parts.append(_run(first, last))
        first = last = rank
    if first >= 0:
        parts.append(_run(first, last))
    return ",".join(parts)


def text_to_ranks(text: object, what: str) -> tuple[int, ...]:
    """`"0-2,5,4"`, `[0, 1, 2, 5, 4]` and `3` -> a tuple of ranks.

    Args:
        what: begins the message of an error.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return (text,)
    # Thousands of ranks, for thousands of tables: no Python step for each.
    if isinstance(text, (list, tuple)) and set(map(type, text)) <= {int} and min(text, default=0) >= 0:
        return tuple(text)
    ranks: list[int] = []
    if isinstance(text, str):
        for part in text.split(",") if text.strip() else ():
            low, dash, high = (word.strip() for word in part.partition("-"))
            last = high if dash else low
            if not (low.isdecimal() and last.isdecimal()) or int(last) < int(low):
                break
            ranks.extend(range(int(low), int(last) + 1))
        else:
            return tuple(ranks)
    raise ConfigError(f'{what} got {text!r}, wanted ranks such as "0-7,12" or [0, 1, 2].')


def owners_to_text(owners: Sequence[tuple[int, ...]]) -> str:
    """Owners of successive row ranges, replicas in braces: `((0,), (1,), (2, 6))` -> `"0-1,{2,6}"`."""
    if len(owners) == 1 and len(owners[0]) == 1:
        return str(owners[0][0])
    parts: list[str] = []
    run: list[int] = []
    for replicas in owners:
        if len(replicas) == 1:
            run.append(replicas[0])
            continue
        if run:
            parts.append(ranks_to_text(run))
            run = []
        parts.append("{" + ranks_to_text(replicas) + "}")
    if run:
        parts.append(ranks_to_text(run))
    return ",".join(parts)


def text_to_owners(text: object, what: str) -> tuple[tuple[int, ...], ...]:
    """The inverse of `owners_to_text`; a list of ranks, or of lists of replicas, is taken too."""
    if isinstance(text, (list, tuple)):
        return tuple(text_to_ranks(item, what) for item in text)
    if not isinstance(text, str):
        return tuple((rank,) for rank in text_to_ranks(text, what))
    owners: list[tuple[int, ...]] = []
    rest = text
    while rest:
        before, brace, after = rest.partition("{")
        single = before.strip().strip(",")
        owners += [(rank,) for rank in text_to_ranks(single, what)] if single else []
        if not brace:
            break
        replicas, closed, rest = after.partition("}")
        if not closed:
            raise ConfigError(f"{what} got {text!r}, in which a brace is not closed.")
        owners.append(text_to_ranks(replicas, what))
    return tuple(owners)


def placement_to_rank(placement: str) -> int:
    """The rank of a placement as `torch.distributed` writes it: `"rank:3/cuda:1"` -> 3."""
    word = placement.split("/")[0].removeprefix("rank:")
    if not word.isdecimal():
        raise ConfigError(f"placement {placement!r} names no rank; wanted one such as 'rank:3/cuda:1'.")
    return int(word)
