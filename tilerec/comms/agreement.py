"""Agreement of ranks outside of a step: on values, and on success or failure. No other file has a protocol for that.

    agree(group, "the plan", plan)              all ranks have the same value, or all raise
    with agreeing(group, "the plan") as found   as `agree`, and an error in the block raises on all ranks
    with on_all_ranks(group, "new ids", "...")  an error in the block raises on all ranks, once all have finished it
    errors_of_ranks(group, error)               the errors of all ranks, for a caller that raises its own kind of error

Each rank sends a digest of 16 bytes. The values themselves are sent only if the digests differ, to name the difference.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress

from tilerec.comms.group import Group
from tilerec.errors import ConfigError, TilerecError


def digest(what: str, value: object) -> bytes:
    """Return 16 bytes that are equal on ranks whose values `agree` finds equal."""
    text = json.dumps(_plain(what, value), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def agree(group: Group, what: str, value: object, ranks: Sequence[int] | None = None) -> None:
    """Return if every rank passes the same value; otherwise raise on every rank, naming the ranks and the difference.

    Args:
        group: the ranks that compare; all of them call.
        what: the value's name in the error: "the plan", "the batch's keys".
        value: None, bool, int, float, str, an enum member, or a sequence, set, mapping or dataclass of such. Mappings
            and sets are compared without regard to order.
        ranks: numbers of the group's ranks in the error; None: their numbers in the group.

    Raises `ConfigError`: `The plan differs between ranks: tables['user'].ranks[1] is 3 on rank 0 and 4 on ranks 2, 3`.
    """
    if group.size == 1:
        return
    digests = group.all_gather_object(digest(what, value))
    camps: dict[object, list[int]] = {}
    for rank, own in enumerate(digests):
        camps.setdefault(own, []).append(rank)
    if len(camps) == 1:
        return
    values = group.all_gather_object(_plain(what, value))
    names = range(group.size) if ranks is None else ranks
    # The largest camp is taken to be right; of equals, the one that holds the lowest rank.
    right, *wrong = sorted(camps.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    lines = []
    for camp in wrong:
        place, expected, got = _first_difference("", values[right[0]], values[camp[0]])
        here, there = (_ranks([names[rank] for rank in own]) for own in (right, camp))
        lines.append(f"{place or 'it'} is {expected} on {here} and {got} on {there}")
    raise ConfigError(
        f"{what[:1].upper()}{what[1:]} differs between ranks: {'; '.join(lines[:4])}. Start every rank with the same "
        f"configuration."
    )


@contextmanager
def agreeing(group: Group, what: str) -> Iterator[dict[str, object]]:
    """Run a block of checks on every rank, then `agree` on the values that it puts into the dict.

    The block costs no collective of its own: an exception on one rank makes `agree` raise on the others.

    Raises the block's own exception; on other ranks what `agree` raises.
    """
    found: dict[str, object] = {}
    try:
        yield found
    except BaseException as error:
        with suppress(ConfigError):  # the other ranks wait for this rank in their `agree`
            agree(group, what, {"checks": _error_text(error)})
        raise
    agree(group, what, {"checks": "passed", **found})


@contextmanager
def on_all_ranks(group: Group, what: str, step: str, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Run a block on every rank of the group; if it raises on one rank, raise on all, once all have finished it.

    Args:
        what, step: object and step in the message on the other ranks.
        ranks: numbers of the group's ranks in the message; None: their numbers in the group.

    Raises the block's own exception; on ranks where the block succeeded, `ConfigError`:
    `The sharded model: its tiles failed on rank 1 with MemoryError: …`.
    """
    own: BaseException | None = None
    try:
        yield
    except BaseException as error:
        own = error
    errors = errors_of_ranks(group, own)
    if own is not None:
        raise own
    if errors:
        names = range(group.size) if ranks is None else ranks
        first = next(iter(errors.values()))
        raise ConfigError(
            f"{what[:1].upper()}{what[1:]}: {step} failed on {_ranks([names[rank] for rank in errors])} with "
            f"{first:.1000}. All ranks stop; fix the cause there."
        )


def errors_of_ranks(group: Group, own: BaseException | None) -> dict[int, str]:
    """Return the texts of the ranks' errors, by rank; ranks without an error are left out. Collective.

    Args:
        own: this rank's error; raised if the exchange itself fails.
    """
    text = None if own is None else f"{type(own).__name__}: {str(own) or 'without a message'}"
    try:
        texts = group.all_gather_object(text) if group.size > 1 else [text]
    except Exception:
        if own is not None:
            raise own from None
        raise
    return {rank: str(one) for rank, one in enumerate(texts) if one is not None}


def _error_text(error: BaseException) -> str:
    """Return an error as a text for other ranks."""
    if isinstance(error, TilerecError):
        return str(error)
    return f"{type(error).__name__}: {str(error) or 'without a message'}"


def _plain(what: str, value: object) -> object:
    """Return the value converted to JSON types."""
    if isinstance(value, enum.Enum):
        return _plain(what, value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _plain(what, fields)
    if isinstance(value, Mapping):
        return {str(key): _plain(what, item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((_plain(what, item) for item in value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(what, item) for item in value]
    raise ConfigError(
        f"agree on {what}: got a value of type {type(value).__name__}, which ranks cannot compare. Pass numbers, "
        f"strings, sequences, mappings or dataclasses of them."
    )


def _first_difference(place: str, expected: object, got: object) -> tuple[str, str, str]:
    """Return the place where two plain values first differ, and the text of each value there."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted({*expected, *got}):
            where = f"{place}.{key}".removeprefix(".") if key.isidentifier() else f"{place}[{key!r}]"
            if key not in expected or key not in got:
                there = ["there" if key in side else "missing" for side in (expected, got)]
                return where, there[0], there[1]
            if not _same(expected[key], got[key]):
                return _first_difference(where, expected[key], got[key])
    if isinstance(expected, list) and isinstance(got, list):
        for index, (one, other) in enumerate(zip(expected, got, strict=False)):
            if not _same(one, other):
                return _first_difference(f"{place}[{index}]", one, other)
        return f"{place or 'it'} (length)", str(len(expected)), str(len(got))
    return place, _short(expected), _short(got)


def _same(one: object, other: object) -> bool:
    """Return True if the values have equal digests: 1 and 1.0 differ, NaN equals NaN."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}…"


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {names}"
