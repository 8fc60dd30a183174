"""Guessed roles of a data set's columns, and a first run file from them.

    role       columns
    label      0 or 1, by name; or a rating, which is a label from some value on
    time       dates, or numbers like Unix times with such a name: the latest tenth is held out
    dense      numbers with fractions, counts, flags
    id         text, numbers named like ids, large numbers, lists
    weights    lists of numbers, as long in each row as a list of ids: the weights of these ids
    (ignored)  columns with another value in each row, long texts, flags named like a second label, other types

Each guess has its reason. A guess is only a start: the run file is there to be corrected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tilerec.data.columns import nearest, plain_name
from tilerec.data.text_files import ENDINGS as TEXT_ENDINGS
from tilerec.errors import ConfigError
from tilerec.recipes.data_profile import ColumnProfile, DataProfile
from tilerec.train.toml_text import toml_text

_LABELS = ("label", "click", "clicked", "is_click", "target", "y", "converted", "conversion", "purchase",
           "purchased", "bought", "liked", "like", "rating", "stars")  # fmt: skip
_TIMES = ("timestamp", "time", "ts", "date", "datetime", "event_time", "created_at", "day", "unixtime")
_WEIGHTS = ("weight", "sample_weight", "importance")
_WEIGHT_WORDS = {"weight", "weights", "score", "scores", "strength", "importance"}
_ID_WORDS = {"id", "ids", "user", "item", "product", "ad", "campaign", "site", "page", "device", "brand", "shop",
             "session", "query", "city", "country", "zip", "region", "category", "categories", "movie", "song",
             "video", "author", "publisher", "advertiser", "tag", "tags", "sku", "asin", "gender", "os"}  # fmt: skip
_COUNT_WORDS = {"count", "counts", "num", "number", "n", "price", "amount", "age", "days", "hours", "total", "sum",
                "avg", "mean", "rate", "ratio", "score", "duration", "length", "size", "clicks", "views"}  # fmt: skip
_SEQUENCE_WORDS = {"hist", "history", "seq", "sequence", "last", "recent", "past", "previous", "watched"}
_LONG_TEXT = 60
_MOST_TABLE_ROWS = 10_000_000
_LEAST_TABLE_ROWS = 16


@dataclass(frozen=True)
class Guess:
    """Guessed role of a column.

    Attributes:
        column: its name.
        type: its type in the data.
        role: "label", "dense", "id", "weights" (of ids), "weight" (of samples), "time", or "" for an ignored column.
        why: the reason.
        settings: of the column in the run file.
        table_rows: of its table, for ids.
    """

    column: str
    type: str
    role: str
    why: str
    settings: dict[str, Any] = field(default_factory=dict)
    table_rows: int = 0


def guess_roles(profile: DataProfile, label: str | None = None) -> list[Guess]:
    """Return a guess for each column, in their order.

    Args:
        label: the label column; None guesses it.

    Raises:
        ConfigError: there is no such column, it is no number, or no column looks like a label.
    """
    columns = {column.name: column for column in profile.columns}
    chosen = _label(columns, label)
    found = [chosen if name == chosen.column else _role(one, profile) for name, one in columns.items()]
    times = [guess for guess in found if guess.role == "time"]
    for extra in times[1:]:
        found[found.index(extra)] = replace(extra, role="", why="a time too; the split uses another")
    weights = [guess for guess in found if guess.role == "weight"]
    for extra in weights[1:]:
        found[found.index(extra)] = replace(extra, role="", why="a weight too; another is used")
    found = _with_weights(found, columns)
    found = _with_plain_names(found)
    if not any(guess.role in ("dense", "id") for guess in found):
        raise ConfigError(
            f"{profile.name}: got no column to predict {chosen.column!r} from; expected numbers or ids. Use data with "
            "more columns."
        )
    return found


def _with_plain_names(guesses: list[Guess]) -> list[Guess]:
    """Return the guesses; id columns whose names cannot be those of tables get a name of their own."""
    taken = {guess.column for guess in guesses}
    found = []
    for guess in guesses:
        plain = plain_name(guess.column)
        if guess.role == "id" and plain != guess.column:
            while plain in taken:
                plain += "_"
            taken.add(plain)
            guess = replace(guess, settings={**guess.settings, "name": plain})
        found.append(guess)
    return found


def words_of(name: str) -> list[str]:
    """Return the words of a name: `userId`, `user_id` and `USER-ID` have the words user, id."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return [word for word in re.split(r"[^a-z]+", spaced.lower()) if word]


def _label(columns: dict[str, ColumnProfile], given: str | None) -> Guess:
    if given is not None:
        if given not in columns:
            raise ConfigError(f"--label: got {given!r}, which is not there; {nearest(given, columns)}")
        found = columns[given]
        if found.kind not in ("integer", "number", "boolean"):
            raise ConfigError(
                f"--label: got {given!r} of type {found.type}; expected a column of numbers. Choose another."
            )
        return _as_label(found, "given")
    named = {name.lower(): one for name, one in reversed(columns.items())}
    candidates = [named[name] for name in _LABELS if name in named and _is_number(named[name])]
    binary = [one for one in columns.values() if _is_number(one) and _is_binary(one)]
    for one in candidates:
        if _is_binary(one):
            return _as_label(one, "named like a label, values 0 and 1")
    if candidates:
        return _as_label(candidates[0], "named like a label")
    if len(binary) == 1:
        return _as_label(binary[0], "the only column with values 0 and 1")
    options = [one.name for one in binary] or [one.name for one in columns.values() if _is_number(one)]
    raise ConfigError(
        f"--label: got nothing, and no column is clearly a label; expected a name such as "
        f"{', '.join(options[:5]) or 'click'}. Pass --label COLUMN."
    )


def _is_number(column: ColumnProfile) -> bool:
    return column.kind in ("integer", "number", "boolean")


def _is_binary(column: ColumnProfile) -> bool:
    return np.array_equal(np.unique(column.sample), (0.0, 1.0))


def _as_label(column: ColumnProfile, why: str) -> Guess:
    if column.missing:
        raise ConfigError(
            f"--label: got {column.name!r} with {column.missing:,} missing values; expected a value in each row. "
            "Remove these rows, or choose another column."
        )
    if not np.isfinite(column.sample).all():
        raise ConfigError(
            f"--label: got {column.name!r} with infinite values; expected finite numbers. Correct these rows, or "
            "choose another column."
        )
    if column.sample.min() == column.sample.max():
        raise ConfigError(
            f"--label: got {column.name!r}, which is {column.sample[0]:g} in all rows; expected different values. "
            "Choose another column, or read more rows with --rows."
        )
    settings: dict[str, Any] = {"column": column.name}
    if not _is_binary(column):
        settings["at_least"] = _cut(column.sample)
        why += f"; 1 for values of at least {settings['at_least']:g}"
    share = float((column.sample >= settings.get("at_least", 1)).mean())
    return Guess(column.name, column.type, "label", f"{why}; {100 * share:.1f}% are 1", settings)


def _cut(labels: npt.NDArray[np.float64]) -> float:
    """Return the least label that counts as 1, above the smallest one.

    Ratings on a scale of 5 are likes from 4 on, by convention; other numbers are cut at their middle.
    """
    low, high = labels.min(), labels.max()
    if low >= 0 and low < 4 <= high <= 5:
        return 4.0
    return float(max(np.median(labels), labels[labels > low].min()))


def _role(column: ColumnProfile, profile: DataProfile) -> Guess:
    ignored = Guess(column.name, column.type, "", "")
    words = words_of(column.name)
    if column.missing == column.rows:
        return replace(ignored, why="all values are missing")
    if column.values and column.distinct <= 1 and not column.kind.startswith("list"):
        return replace(ignored, why="one value in all rows")
    if _is_time(column, words):
        if column.missing:
            return replace(ignored, why=f"a time, but {column.missing:,} values are missing")
        split = _split(column, profile)
        why = "a time: the latest tenth is held out" if split else "a time; set hold_out to split by it"
        return replace(ignored, role="time", why=why, settings=split)
    if column.name.lower() in _WEIGHTS and _is_number(column) and column.sample.min() >= 0:
        if column.missing:
            return replace(ignored, why=f"named like a weight of samples, but {column.missing:,} are missing")
        return replace(ignored, role="weight", why="named like a weight of samples")
    if column.kind in ("list of integer", "list of text"):
        return _list(column, words, profile)
    if column.kind == "text":
        return _text(column, profile)
    if _is_number(column) and _is_binary(column):
        if column.name.lower() in _LABELS:
            return replace(ignored, why="a second label, perhaps known only later; add it to the labels, or to dense")
        return _dense(column, "a flag, 0 or 1")
    if column.kind == "number" or (column.kind == "integer" and _is_count(column, words)):
        return _dense(column, "counts or a scale" if column.kind == "integer" else "numbers with fractions")
    if column.kind == "integer":
        if _is_unique(column):
            return replace(ignored, why="another value in each row")
        return _id(column, profile, "numbers of many values, or named like an id")
    return replace(ignored, why="a type without a role")


def _is_time(column: ColumnProfile, words: list[str]) -> bool:
    if column.time_type is not None:
        return True
    named = column.name.lower() in _TIMES or any(word in ("timestamp", "datetime", "ts") for word in words)
    return named and column.kind in ("integer", "number") and len(column.sample) > 0 and column.sample.min() > 1e8


def _split(column: ColumnProfile, profile: DataProfile) -> dict[str, Any]:
    """Return the first held-out time: nine tenths of the rows, or of the time, come before it."""
    if profile.total == profile.rows and column.values <= len(column.sample):
        at: Any = float(np.quantile(column.sample, 0.9))
        if at <= column.sample.min():
            return {}
        if column.time_type is not None:
            text = _time_text(int(at), column)
            return {"column": column.name, "at_least": text} if text else {}
    elif column.low is None or column.time_type is not None:
        return {}
    else:
        low, high = float(column.low), float(column.high)
        at = low + 0.9 * (high - low)
    whole = column.kind == "integer" or column.type.startswith("decimal")
    return {"column": column.name, "at_least": f"{at:.0f}" if whole else repr(at)}


def _time_text(at: int, column: ColumnProfile) -> str:
    """Return a time as the data write it; "" for a text file whose times have an offset from UTC.

    The reader compares the times of text files as texts: "2024-06-01T09:00:00" is above "2024-06-01 21:00:00".
    """
    text = _iso_text(at, column)
    if not column.time_text:
        return text
    between = column.time_text[10:11]
    first = _iso_text(int(column.sample[0]), column)
    written = f"{first[:10]}{between}{first[11:16]}"
    # Without fractions and "Z", and as long as those of the data, the text is not above any form of the same time.
    end = min(19, len(column.time_text.removesuffix("Z")))
    return f"{text[:10]}{between}{text[11:end]}" if column.time_text.startswith(written) else ""


def _iso_text(time: int, column: ColumnProfile) -> str:
    """Return a time that Arrow stores as a number in the form "2024-06-01 21:00:00"."""
    assert column.time_type is not None
    stored = pa.int32() if column.time_type.bit_width == 32 else pa.int64()
    return str(pa.scalar(time, stored).cast(column.time_type))


def _is_count(column: ColumnProfile, words: list[str]) -> bool:
    """Return True for integers whose size has a meaning, as that of counts; False for ids."""
    low, high = float(column.sample.min()), float(column.sample.max())
    if any(word in _COUNT_WORDS for word in words):
        return True
    if any(word in _ID_WORDS for word in words) or high > 2**31 or low < -(2**31):
        return False
    # Counts crowd near 0; ids are spread over their range.
    skewed = float(np.quantile(column.sample, 0.5)) * 10 < high and low >= -10
    return skewed or column.distinct <= 32


def _is_unique(column: ColumnProfile) -> bool:
    return column.values >= 100 and column.distinct > 0.95 * column.values


def _dense(column: ColumnProfile, why: str) -> Guess:
    settings: dict[str, Any] = {"column": column.name}
    sample = column.sample
    if np.abs(sample).max() > np.finfo(np.float32).max:
        return Guess(column.name, column.type, "", "numbers that are infinite, or too large for float32")
    low, high, std = float(sample.min()), float(sample.max()), float(sample.std())
    if low >= -10 and high > 100 and high > 10 * max(1.0, float(np.median(sample))):
        settings["transform"] = "log"
        why += f", up to {high:,.4g}: log"
    elif (abs(float(sample.mean())) > 3 or std > 3) and std > 0:
        settings |= {"transform": "normalize", "mean": _short(float(sample.mean())), "std": _short(std)}
        why += f", around {settings['mean']:g}: normalized"
    if column.missing:
        settings["missing"] = "zero"
        why += f"; {100 * column.missing / column.rows:.1f}% missing"
    return Guess(column.name, column.type, "dense", why, settings)


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def _text(column: ColumnProfile, profile: DataProfile) -> Guess:
    lengths = [len(text) for text in column.texts]
    if _is_unique(column):
        return Guess(column.name, column.type, "", "another value in each row")
    if np.mean(lengths) > _LONG_TEXT:
        return Guess(column.name, column.type, "", f"texts of {np.mean(lengths):.0f} characters on average")
    lists = [text for text in column.texts if "|" in text]
    if profile.format == "text" and len(lists) > 0.2 * len(column.texts):
        parts = {part for text in column.texts for part in text.split("|")}
        listed = _id(column, profile, "lists with | between the ids", distinct=len(parts))
        settings = {**listed.settings, "kind": "list", "separator": "|", "missing": "empty"}
        return replace(listed, settings=settings)
    return _id(column, profile, "text")


def _list(column: ColumnProfile, words: list[str], profile: DataProfile) -> Guess:
    sequence = any(word in _SEQUENCE_WORDS for word in words)
    found = _id(column, profile, f"lists of up to {column.longest} ids")
    settings = {**found.settings, "kind": "sequence" if sequence else "list", "missing": "empty"}
    if sequence:
        settings["max_length"] = max(1, min(50, column.longest))
    return replace(found, settings=settings)


def _with_weights(found: list[Guess], columns: dict[str, ColumnProfile]) -> list[Guess]:
    """Return the guesses with lists of numbers as the weights of the ids whose lists have the same lengths."""
    pairs = []
    for at, guess in enumerate(found):
        column = columns[guess.column]
        complete = column.values == column.listed > 0 and np.isfinite(column.sample).all()
        if column.kind != "list of number" or not complete:
            continue
        words = set(words_of(column.name))
        # Vectors have one length in all rows, as some lists of ids do: then the names must belong together, too.
        vectors = column.listed == column.longest * column.rows
        for of, ids in enumerate(found):
            alike = bool(words.intersection(words_of(ids.column)))
            same = columns[ids.column].lengths_digest == column.lengths_digest
            if ids.settings.get("kind") == "list" and same and (not vectors or alike or words & _WEIGHT_WORDS):
                pairs.append((not alike, abs(of - at), at, of))
    found = list(found)
    for _, _, at, of in sorted(pairs):
        weights, ids = found[at], found[of]
        if weights.role or "weights" in ids.settings:
            continue
        why = f"weights of the ids of {ids.column}: lists of the same lengths"
        found[at] = replace(weights, role="weights", why=why)
        settings, why = {**ids.settings, "weights": weights.column}, f"{ids.why}; {weights.column} has their weights"
        found[of] = replace(ids, settings=settings, why=why)
    return found


def _id(column: ColumnProfile, profile: DataProfile, why: str, distinct: int = 0) -> Guess:
    count = distinct or column.distinct
    expected = expected_distinct(count, column.values, profile)
    rows = table_rows(expected)
    settings: dict[str, Any] = {"column": column.name}
    if column.missing or profile.total != profile.rows:
        settings["missing"] = "row"
    more = f", about {expected:,} in all rows" if expected > 1.05 * count else ""
    about = "about " if count >= 100 else ""  # a sketch counts: larger numbers may be 1 % off
    why += f"; {about}{count:,} distinct{more}"
    return Guess(column.name, column.type, "id", why, settings, rows)


def expected_distinct(distinct: int, values: int, profile: DataProfile) -> int:
    """Return the distinct values to expect in all rows, from those of the rows that were read.

    Heaps' law: the number grows like a power of the rows. The power follows from the share of new values: 0 if values
    repeat many times, 1 if each is new.
    """
    if profile.total == profile.rows or not values:
        return distinct
    growth = (profile.total or 10 * profile.rows) / profile.rows
    power = min(1.0, 2 * distinct / values)
    return round(distinct * growth**power)


def table_rows(distinct: int) -> int:
    """Return the rows of a table for hashed ids: 1.25 per distinct id, two digits, within bounds."""
    wanted = max(_LEAST_TABLE_ROWS, math.ceil(1.25 * distinct))
    digits = 10 ** max(0, len(str(wanted)) - 2)
    return min(_MOST_TABLE_ROWS, -(-wanted // digits) * digits)


def run_text(profile: DataProfile, path: str, guesses: list[Guess]) -> str:
    """Return a commented run file for the guesses.

    Args:
        path: of the data, from the folder of the file.
    """
    roles = {role: [guess for guess in guesses if guess.role == role] for role in ("label", "dense", "id")}
    columns: dict[str, Any] = {}
    weight = next((guess for guess in guesses if guess.role == "weight"), None)
    if weight is not None:
        columns["weight"] = weight.column
    columns["labels"] = [guess.settings for guess in roles["label"]]
    columns["dense"] = [guess.settings for guess in roles["dense"]]
    columns["ids"] = [guess.settings for guess in roles["id"]]
    columns["tables"] = [
        {"name": guess.settings.get("name", guess.column), "rows": guess.table_rows} for guess in roles["id"]
    ]
    time = next((guess.settings for guess in guesses if guess.role == "time" and guess.settings), None)
    document = {
        "data": {
            "kind": "files",
            "path": [path],
            **({"format": "text"} if profile.format == "text" and not path.endswith(TEXT_ENDINGS) else {}),
            "hold_out": time or {"every": 10},
            "columns": {name: value for name, value in columns.items() if value},
        },
        "model": _model(guesses),
        "train": _train(profile),
    }
    ignored = [f"  {' '.join(guess.column.splitlines())}: {guess.why}" for guess in guesses if not guess.role]
    head = [
        f"First run file for {path}, from {profile.rows:,} rows.",
        "Roles and sizes are guesses: correct them. docs/training.md lists every setting.",
        *(["", "Ignored columns:", *ignored] if ignored else []),
    ]
    comments = {
        "data.hold_out": "Rows that only evaluate: "
        + ("the latest tenth by time." if time else "every 10th row. With a time column: column and at_least."),
        "data.columns.labels": "What the model predicts, from 0 to 1.",
        "data.columns.dense": "Numbers, as they are or transformed: transform = none, log or normalize.",
        "data.columns.ids": "Ids: kind = single, list or sequence; columns with the same `table` share its rows.",
        "data.columns.tables": 'Tables of the ids. Hashed ids may share rows; ids = "managed" gives each its own.',
        "model": "dlrm needs dense features; dcn, mlp and linear (a baseline) take any columns: docs/models.md.",
        "train": "A second epoch often fits the past only. seed, device, eval_every and more: docs/training.md.",
        **_element_comments("labels", roles["label"]),
        **_element_comments("dense", roles["dense"]),
        **_element_comments("ids", roles["id"]),
    }
    return "".join(f"# {line}".rstrip() + "\n" for line in head) + "\n" + toml_text(document, comments)


def _element_comments(name: str, guesses: Iterable[Guess]) -> dict[str, str]:
    return {f"data.columns.{name}[{i}]": guess.why for i, guess in enumerate(guesses)}


def _model(guesses: list[Guess]) -> dict[str, Any]:
    dense = any(guess.role == "dense" for guess in guesses)
    ids = sum(guess.role == "id" for guess in guesses)
    if not ids or (not dense and ids != 2):
        return {"kind": "mlp", "embedding_dim": 16}
    return {"kind": "dlrm" if dense else "dot", "embedding_dim": 16}


def _train(profile: DataProfile) -> dict[str, Any]:
    total = profile.total or 10 * profile.rows
    batch_size = max(64, min(4096, 1 << round(math.log2(max(1, total / 400)))))
    return {
        "batch_size": batch_size,
        "epochs": 1,
        "embedding_optimizer": {"kind": "RowWiseAdagrad", "lr": 0.05},
        "dense_optimizer": {"kind": "Adam", "lr": 0.001},
    }
