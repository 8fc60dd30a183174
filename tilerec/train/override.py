"""Overrides of a nested frozen config: set a field by its dotted name, from text checked against the field's type.

override(run, "train.batch_size=4096")
override(run, "train.embedding_optimizer=RowWiseAdagrad")      another optimizer class with the same learning rate
override(run, "train.embedding_optimizer.lr=0.02")
override(run, "data.columns.ids[0].max_length=20")             an element of a list of tables
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from tilerec.errors import ConfigError, TilerecError
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.torch_optimizer import from_torch
from tilerec.train.values import fit, hints_of, plain_value

_C = TypeVar("_C")


def override(config: _C, assignment: str) -> _C:
    """Return a copy of `config` with one field changed.

    Args:
        config: a frozen dataclass, whose fields may be such dataclasses.
        assignment: `name.name=value`. Values are numbers, true/false, text, `none` if the field allows it, or a
            comma-separated list for tuples.

    Raises:
        ConfigError: no `=`, an unknown name (the message suggests the nearest one), or a value of a wrong type.
    """
    name, equals, text = assignment.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set: got {assignment!r}; expected name=value, such as train.batch_size=4096.")
    return _with_value(config, name.strip().split("."), text.strip(), "")


def override_all(config: _C, assignments: Iterable[str]) -> _C:
    """Apply `override` for each assignment in order."""
    for assignment in assignments:
        config = override(config, assignment)
    return config


def settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the value of every field that can be overridden, by dotted name, in order."""
    found: dict[str, Any] = {}
    for item in fields(config):
        if not item.init:
            continue
        value = getattr(config, item.name)
        if isinstance(value, OptimizerSpec):
            found[prefix + item.name] = type(value).__name__
        if is_dataclass(value):
            found.update(settings(value, f"{prefix}{item.name}."))
        elif _is_list(value):
            for i, one in enumerate(value):
                found.update(settings(one, f"{prefix}{item.name}[{i}]."))
        else:
            found[prefix + item.name] = value
    return found


def _with_value(config: Any, path: list[str], text: str, where: str) -> Any:
    name, index = re.fullmatch(r"([^\[]*)(\[.*)?", path[0], re.DOTALL).groups()  # type: ignore[union-attr] # any text fits
    rest = path[1:]
    known = [item.name for item in fields(config) if item.init]
    if name not in known:
        raise ConfigError(f"There is no setting {where + name!r}. {_suggestion(config, name, rest, known, where)}")
    value = getattr(config, name)
    full = where + name
    if _is_list(value):
        return replace(config, **{name: _with_element(value, index, rest, text, full)})
    if index:
        raise ConfigError(f"{full!r} is not a list of tables and has no element {index}. Write {full}=….")
    if rest:
        if not is_dataclass(value):
            raise ConfigError(f"{full!r} is a value and has no setting {rest[0]!r}. Write {full}=….")
        return replace(config, **{name: _with_value(value, rest, text, full + ".")})
    if isinstance(value, OptimizerSpec):
        return replace(config, **{name: _optimizer(full, value, text)})
    if is_dataclass(value):
        inner = ", ".join(f"{full}.{item.name}" for item in fields(value) if item.init)
        raise ConfigError(f"{full!r} is a group of settings. Set one of {inner}.")
    hint = hints_of(type(config))[name]
    return replace(config, **{name: fit(hint, plain_value(hint, text), full)})


def _is_list(value: Any) -> bool:
    """Return True for a list of tables, such as the columns of a data set."""
    return isinstance(value, tuple) and bool(value) and all(is_dataclass(one) for one in value)


def _with_element(value: tuple[Any, ...], index: str | None, rest: list[str], text: str, full: str) -> Any:
    number = (index or "")[1:-1]
    if not rest or not number.isdecimal() or int(number) >= len(value):
        raise ConfigError(
            f"{full!r} is a list of {len(value)} tables; expected an element and its setting. Write "
            f"{full}[0].{next(item.name for item in fields(value[0]))}=…."
        )
    i = int(number)
    changed = _with_value(value[i], rest, text, f"{full}[{i}].")
    return (*value[:i], changed, *value[i + 1 :])


def _suggestion(config: Any, name: str, rest: list[str], known: list[str], where: str) -> str:
    full_name = where + ".".join([name, *rest])
    near = difflib.get_close_matches(name, known, 1, cutoff=0.6)
    if near:
        return f"Did you mean {where + near[0]!r}?"
    # Search other groups: `batch_size` finds `train.batch_size`.
    inner = settings(config, where)
    last = [full for full in inner if full.rsplit(".", 1)[-1] == (rest or [name])[-1]]
    near = last[:1] or difflib.get_close_matches(full_name, inner, 1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Expected one of {', '.join(where + other for other in known)}."


def _optimizer(full: str, old: OptimizerSpec, text: str) -> OptimizerSpec:
    try:
        return from_torch(text, {"lr": old.lr})
    except TilerecError as error:
        raise ConfigError(f"{full}: got {text!r}. {error}") from error
