"""The errors a caller can cause.

Every message names the object, what it got, what it wanted, and the next move. All of them are `ValueError`s, so code
that already guards against bad arguments keeps working.
"""

from __future__ import annotations


class TilerecError(ValueError):
    """Anything the caller can put right."""


class ConfigError(TilerecError):
    """A table, optimizer, recipe or option that contradicts itself or its surroundings."""


class FileError(ConfigError, OSError):
    """A file that cannot be opened, read or written.

    Args:
        message: as of every error.
        number: `errno` of the system's error, if there is one.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


class InputError(TilerecError):
    """A batch or a file whose contents are wrong: unknown feature, id out of range, malformed line."""


class CommsError(TilerecError, RuntimeError):
    """A collective that cannot end: a peer failed or died, did not come in time, or made another call."""


class ReshardError(TilerecError, RuntimeError):
    """A move of tables that stopped midway. Raised on every rank; the model works, some tables moved and some not."""
