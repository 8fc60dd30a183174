"""Hash of a nested value: the same bits give the same 16 hexadecimal digits on every machine.

digest({"a": torch.zeros(2)})      the first 64 bits of a SHA-256
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

DIGITS = 16


def digest(value: Any) -> str:
    """Return the hash of tensors, numbers, texts, and of mappings and sequences of them.

    A tensor counts with its dtype, shape and bytes; a mapping with its items in the order of their keys.

    Raises:
        TypeError: the value holds an object of another type.
    """
    hashed = hashlib.sha256()
    _add(hashed, value)
    return hashed.hexdigest()[:DIGITS]


def _add(hashed: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        hashed.update(f"tensor {value.dtype} {list(value.shape)}\n".encode())
        hashed.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        hashed.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=str):
            _add(hashed, key)
            _add(hashed, value[key])
    elif isinstance(value, float):
        hashed.update(f"float {value.hex()}\n".encode())
    elif value is None or isinstance(value, (bool, int, Enum)):
        hashed.update(f"{type(value).__name__} {value}\n".encode())
    elif isinstance(value, (str, bytes)):
        data = value.encode() if isinstance(value, str) else value
        hashed.update(f"{type(value).__name__} {len(data)}\n".encode() + data)
    elif isinstance(value, Sequence):
        hashed.update(f"sequence {len(value)}\n".encode())
        for item in value:
            _add(hashed, item)
    else:
        raise TypeError(f"digest: got a {type(value).__name__}; expected tensors, numbers and texts.")
