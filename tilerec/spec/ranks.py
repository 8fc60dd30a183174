"""Ranks as text, `"0-7,12"`: people read and edit plans and topologies, and a thousand ranks fit on a line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import cast

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue, shown

MOST_RANKS = 2**20
"""Largest world size. A range of ranks is checked against it before it is expanded."""
RANKS = f'ranks such as "0-7,12" or [0, 1, 2], each below {MOST_RANKS:,}'
_RANK = re.compile(r"[0-9]{1,7}")
_REPLICAS = re.compile(r"\{([^{}]*)\}")


def is_int_from(value: object, least: int) -> bool:
    """Return True for an int of at least `least` that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _format_run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def ranks_to_text(ranks: Iterable[int]) -> str:
    """Format ranks in the given order, with runs of successors joined: `(0, 1, 2, 5, 4)` -> `"0-2,5,4"`."""
    if isinstance(ranks, tuple):
        # Cached: thousands of tables are on the same thousands of ranks.
        return _cached_runs(ranks) if len(ranks) != 1 or ranks[0] < 0 else str(ranks[0])
    return _format_runs(ranks)


@lru_cache(maxsize=64)
def _cached_runs(ranks: tuple[int, ...]) -> str:
    return _format_runs(ranks)


def _format_runs(ranks: Iterable[int]) -> str:
    parts: list[str] = []
    first = last = -2
    for rank in ranks:
        if rank == last + 1 and first >= 0:
            last = rank
            continue
        if first >= 0:
            parts.append(_format_run(first, last))
        first = last = rank
    if first >= 0:
        parts.append(_format_run(first, last))
    return ",".join(parts)


def text_to_ranks(text: object, what: str) -> tuple[int, ...]:
    """Convert `"0-2,5,4"`, `[0, 1, 2, 5, 4]` or `3` to a tuple of ranks.

    Args:
        what: name of the value; the error message begins with it.

    Raises:
        ConfigError: another form, a rank from `MOST_RANKS` up, or more than `MOST_RANKS` ranks.
    """
    ranks = _parse_ranks(text)
    if ranks is None:
        raise ConfigError(f"{what}: got {shown(text)}; expected {RANKS}. Write the ranks in this form.")
    return ranks


def read_ranks(value: JsonValue) -> tuple[int, ...]:
    """Read ranks of a document in the forms of `text_to_ranks`; equal strings are expanded once."""
    text = value.value
    if isinstance(text, str) and ("ranks", text) in value.memory:
        return cast("tuple[int, ...]", value.memory["ranks", text])
    ranks = _parse_ranks(text, value.spend)
    if ranks is None:
        raise value.error(RANKS, "Write the ranks in this form.")
    if isinstance(text, str):
        value.memory["ranks", text] = ranks
    return ranks


def read_hosts(value: JsonValue) -> list[tuple[int, ...]]:
    """Read the ranks of each host from a list such as `["0-3", "4-7"]`."""
    return [read_ranks(host) for host in value.items('a list such as ["0-3", "4-7"]')]


def _parse_ranks(text: object, spend: Callable[[int], None] | None = None) -> tuple[int, ...] | None:
    """Parse ranks from a string, number or list; return None if invalid. Calls `spend` before it expands a string."""
    if isinstance(text, int):
        return (text,) if not isinstance(text, bool) and 0 <= text < MOST_RANKS else None
    # No Python loop: there may be thousands of ranks for each of thousands of tables.
    if isinstance(text, (list, tuple)):
        whole = set(map(type, text)) <= {int} and len(text) <= MOST_RANKS
        return tuple(text) if whole and 0 <= min(text, default=0) <= max(text, default=0) < MOST_RANKS else None
    if not isinstance(text, str):
        return None
    ranges: list[range] = []
    count = 0
    for part in text.split(",") if text.strip() else ():
        low, dash, high = (word.strip() for word in part.partition("-"))
        last = high if dash else low
        if not (_RANK.fullmatch(low) and _RANK.fullmatch(last)):
            return None
        # A `range` has its size without being expanded.
        ranges.append(range(int(low), int(last) + 1))
        count += len(ranges[-1])
        if not ranges[-1] or int(last) >= MOST_RANKS or count > MOST_RANKS:
            return None
    if spend is not None:
        spend(count)
    return tuple(chain.from_iterable(ranges))


def owners_to_text(owners: Sequence[tuple[int, ...]]) -> str:
    """Format the owners of successive row ranges, replicas in braces: `((0,), (1,), (2, 6))` -> `"0-1,{2,6}"`."""
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


def read_owners(value: JsonValue) -> tuple[tuple[int, ...], ...]:
    """Read owners that `owners_to_text` wrote; also accepts a list of ranks, or of lists of replicas."""
    text = value.value
    if isinstance(text, (list, tuple)):
        return tuple(read_ranks(item) for item in value.items())
    if not isinstance(text, str):
        return tuple((rank,) for rank in read_ranks(value))
    if ("owners", text) not in value.memory:
        owners = _parse_owners(text, value.spend)
        if owners is None:
            raise value.error(f'{RANKS}, replicas in braces: "0-3,{{4,5}}"', "Write the owners in this form.")
        value.memory["owners", text] = owners
    return cast("tuple[tuple[int, ...], ...]", value.memory["owners", text])


def _parse_owners(text: str, spend: Callable[[int], None]) -> tuple[tuple[int, ...], ...] | None:
    owners: list[tuple[int, ...]] = []
    rest = text
    # Split once at the braces: odd pieces are replicas, even pieces are ranks with one replica each.
    for place, piece in enumerate(_REPLICAS.split(rest)):
        ranks = _parse_ranks(piece if place % 2 else piece.strip().strip(","), spend)
        if ranks is None or len(owners) + len(ranks) > MOST_RANKS:
            return None
        owners += [ranks] if place % 2 else [(rank,) for rank in ranks]
    return tuple(owners)


def placement_to_rank(placement: str) -> int:
    """Return the rank of a placement of `torch.distributed`: `"rank:3/cuda:1"` -> 3."""
    word = placement.split("/")[0].removeprefix("rank:")
    if not word.isdecimal():
        raise ConfigError(f"placement: got {placement!r}; expected a rank and a device. Write them as 'rank:3/cuda:1'.")
    return int(word)
