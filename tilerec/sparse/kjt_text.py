"""Text of a keyed jagged tensor: its bags by key, or its shapes."""

from __future__ import annotations

from collections.abc import Callable

from tilerec.sparse.jagged_tensor import JaggedTensor, describe_bags, describe_parts, readable
from tilerec.sparse.keys import shorten
from tilerec.sparse.kjt_fields import Parts
from tilerec.sparse.value_checks import LINES


def features_text(parts: Parts, bags_of: Callable[[str], JaggedTensor]) -> str:
    """Return the bags of each key, one line per key. `bags_of` slices the tensor by key."""
    if len(parts.keys) == 0:
        return "KeyedJaggedTensor()\n"
    rows = []
    for key in parts.keys:
        bags = describe_bags(bags_of(key), indent=8)
        if parts.weights is not None:
            bags = f"{{\n        {bags}\n    }}"
        rows.append(f'    "{key}": {bags}')
    return "KeyedJaggedTensor({\n" + ",\n".join(rows) + "\n})\n"


def is_readable(parts: Parts) -> bool:
    """Return True if the contents are small, valid and on a device with memory."""
    flat = parts.as_jagged()
    return (
        len(parts.keys) <= LINES
        and readable(flat)
        and (int(flat.offsets()[0]) == 0 and int(flat.offsets()[-1]) == parts.values.shape[0])
    )


def shapes_text(parts: Parts) -> str:
    """Return the keys, shapes, dtype and device."""
    return f"KeyedJaggedTensor(keys {shorten(parts.keys.names)}, {describe_parts(parts.as_jagged())})"
