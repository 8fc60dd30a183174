"""`Changes`: what a model may have that differs from its checkpoint, stated by the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from tilerec.errors import ConfigError

CHANGES_KEY = "changes"
"""Name of the note of changes in the metadata of a checkpoint."""


@dataclass(frozen=True)
class Changes:
    """Differences between a checkpoint and the job that loads it; all others are refused.

    Names are those of tensors, `model.ebc.embedding_bags.user.weight`. `drop`, `keep` and `resize` hold patterns: `*`
    matches any text.

    Attributes:
        rename: beginning of a name in the checkpoint -> beginning of its name here. The longest match counts.
        drop: names in the checkpoint that are not loaded. A part whose tensors are all dropped is left as it is.
        keep: names here that the checkpoint lacks; these tensors keep their values.
        resize: names here whose shape may differ. Cells that both have are loaded; further cells keep their values.

    Raises:
        ConfigError: a value is something else.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    drop: Sequence[str] = ()
    keep: Sequence[str] = ()
    resize: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.rename, Mapping) or not _are_texts([*self.rename, *self.rename.values()]):
            raise ConfigError(
                f"Changes: got rename={self.rename!r}; expected a dict from names in the checkpoint to names here. "
                "Correct it."
            )
        object.__setattr__(self, "rename", dict(self.rename))
        for name in ("drop", "keep", "resize"):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Sequence) or not _are_texts(given):
                raise ConfigError(f"Changes: got {name}={given!r}; expected a list of names. Write {name}=[...].")
            object.__setattr__(self, name, tuple(given))

    def name_here(self, saved: str) -> str | None:
        """Return the name here of a saved tensor; None if it is dropped."""
        if matches(saved, self.drop):
            return None
        fitting = [old for old in self.rename if saved == old or saved.startswith(f"{old}.")]
        if not fitting:
            return saved
        old = max(fitting, key=len)
        return self.rename[old] + saved[len(old) :]

    @property
    def note(self) -> dict[str, Any]:
        """Metadata of the checkpoints that a job with these changes saves; {} if nothing is stated.

        Such a checkpoint is loaded without changes where it fits: the same job, started again, does not drop what it
        has trained since.
        """
        if self == Changes():
            return {}
        lists = {name: list(getattr(self, name)) for name in ("drop", "keep", "resize")}
        return {CHANGES_KEY: {"rename": dict(self.rename), **lists}}


def _are_texts(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a name fits one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
