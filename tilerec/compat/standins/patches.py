"""Attributes that objects of TorchRec have and tilerec's do not, added to tilerec's classes while stand-ins are there."""

from __future__ import annotations

from typing import Any


class Patches:
    """Attributes added to classes."""

    def __init__(self) -> None:
        self._before: list[tuple[type, str, Any]] = []

    def apply(self) -> None:
        """Add the attributes."""

    def undo(self) -> None:
        """Restore the classes."""
        for kind, name, before in reversed(self._before):
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)
        self._before.clear()
