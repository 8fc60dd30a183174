"""Objects in an optimizer's state that save and load themselves, as quantised moments do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard


class Stateful(Protocol):
    """An object that returns its state and takes it back."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors and numbers by name."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take them back."""


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return True for an object with a `state_dict()` and a `load_state_dict()`."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
