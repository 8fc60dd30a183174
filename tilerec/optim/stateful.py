"""Protocol of objects in an optimizer's state that save and load themselves, such as quantised moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard


class Stateful(Protocol):
    """An object that saves and loads its own state."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors and numbers by name."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a result of `state_dict`."""


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return True for an object with a `state_dict()` and a `load_state_dict()`."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
