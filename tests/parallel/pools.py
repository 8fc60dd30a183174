"""Pools of ranks."""

from __future__ import annotations

from collections.abc import Callable

from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
