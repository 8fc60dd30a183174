"""`Changes`: what a model may have that differs from its checkpoint, stated by the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Changes:
    """Differences between a checkpoint and the job that loads it; all others are refused.

    Names are those of tensors, `model.ebc.embedding_bags.user.weight`. `drop`, `keep` and `resize` hold patterns: `*`
    matches any text.

    Args:
        rename: beginning of a name in the checkpoint -> beginning of its name here. The longest match counts.
        drop: names in the checkpoint that are not loaded.
        keep: names here that the checkpoint lacks; these tensors keep their values.
        resize: names here whose shape may differ. Cells that both have are loaded; further cells keep their values.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    drop: Sequence[str] = ()
    keep: Sequence[str] = ()
    resize: Sequence[str] = ()

    def name_here(self, saved: str) -> str | None:
        """Return the name here of a saved tensor; None if it is dropped."""
        if matches(saved, self.drop):
            return None
        fitting = [old for old in self.rename if saved == old or saved.startswith(f"{old}.")]
        if not fitting:
            return saved
        old = max(fitting, key=len)
        return self.rename[old] + saved[len(old) :]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a name fits one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
