"""State of a job as a JSON tree, and its tensors by name.

    {"model": {"table.weight": T}, "steps": 3}    ->    tensors {"model.table.weight": T}
                                                        {"dict": {"model": {"dict": {"table.weight":
                                                            {"tensor": "model.table.weight"}}}, "steps": 3}}

A tensor's name joins the keys on its path with dots. Dicts, lists, tuples, None, bools, whole numbers, floats and
strings come back as they were, with the types of their keys. Nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.json_document import MOST_NUMBER, JsonValue

Json = Any
"""A value that `json` writes and reads."""


def flatten(state: Mapping[str, object]) -> tuple[Json, dict[str, Tensor]]:
    """Return the JSON tree of a state and its tensors by name.

    Raises:
        ConfigError: the state has a value that JSON cannot hold, or two tensors of one name; or a reader would refuse
            its tree.
    """
    tensors: dict[str, Tensor] = {}
    try:
        tree = _node("", state, tensors)
        JsonValue.of({"state": tree}, "Checkpoint")
    except RecursionError:
        raise ConfigError(
            "Checkpoint: got a state nested more than 1,000 deep, or inside of itself; expected at most 30 levels. "
            "Flatten it in the object's state_dict()."
        ) from None
    return tree, tensors


def _node(path: str, value: object, tensors: dict[str, Tensor]) -> Json:
    if isinstance(value, Tensor):
        if path in tensors:
            raise ConfigError(f"Checkpoint: got two tensors named {path!r}; expected one of each name. Rename a key.")
        tensors[path] = value.detach()
        return {"tensor": path}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if abs(value) <= MOST_NUMBER else {"int": str(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) and abs(value) < MOST_NUMBER else {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        nodes = [_node(_joined(path, i), item, tensors) for i, item in enumerate(value)]
        return {"tuple": nodes} if isinstance(value, tuple) else nodes
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {"dict": {key: _node(_joined(path, key), item, tensors) for key, item in value.items()}}
        pairs = [[_key(path, key), _node(_joined(path, key), item, tensors)] for key, item in value.items()]
        return {"pairs": pairs}
    raise ConfigError(
        f"Checkpoint: got a {type(value).__name__} at {path!r}; expected tensors, numbers, strings, None, lists and "
        "dicts of them. Convert it in the object's state_dict()."
    )


def _key(path: str, key: object) -> object:
    if key is None or isinstance(key, (bool, int, str)):
        return key
    raise ConfigError(
        f"Checkpoint: got a key of type {type(key).__name__} in {path!r}; expected strings and whole numbers. Convert "
        "it in the object's state_dict()."
    )


def _joined(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def unflatten(node: JsonValue, tensor: Callable[[str, JsonValue], Tensor]) -> Any:
    """Return the state of a JSON tree.

    Args:
        tensor: returns the tensor of a name; the second argument is its place in the document, for errors.

    Raises:
        ConfigError: the tree is not one of `flatten`.
    """
    value = node.value
    if isinstance(value, list):
        return [unflatten(item, tensor) for item in node.items()]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise node.error("one of dict, pairs, tuple, tensor, int and float")
    ((kind, inner),) = node.members().items()
    if kind == "dict":
        return {key: unflatten(item, tensor) for key, item in inner.members().items()}
    if kind == "tuple":
        return tuple(unflatten(item, tensor) for item in inner.items())
    if kind == "tensor":
        return tensor(inner.text(), inner)
    if kind == "pairs":
        pairs = [pair.items() for pair in inner.items()]
        if any(len(pair) != 2 or isinstance(pair[0].value, (dict, list)) for pair in pairs):
            raise inner.error("pairs of a key and a value")
        return {key.value: unflatten(item, tensor) for key, item in pairs}
    if kind in ("int", "float"):
        try:
            return int(inner.text()) if kind == "int" else float(inner.text())
        except ValueError:
            raise inner.error("the text of a number") from None
    raise node.error("one of dict, pairs, tuple, tensor, int and float")
