"""Errors that a caller can cause.

Every message names the object, the value it got, the values it expects, and the next move. All classes derive from
`ValueError`, so code that already catches bad arguments keeps working.
"""

from __future__ import annotations


class TilerecError(ValueError):
    """Base of all errors that the caller can fix."""


class ConfigError(TilerecError):
    """A table, optimizer, recipe or option that is invalid, or that conflicts with another setting."""


class FileError(ConfigError, OSError):
    """A file that cannot be opened, read or written.

    Args:
        message: the text of the error.
        number: `errno` of the operating system's error; None if there is none.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


class InputError(TilerecError):
    """Invalid contents of a batch or a file: unknown feature, id out of range, malformed line."""


class CommsError(TilerecError, RuntimeError):
    """A collective that cannot complete: a peer failed, died, timed out, or called a different collective."""


class MissingExtraError(TilerecError, ImportError):
    """A part of the library that needs a package of an optional extra, which is not installed.

    Args:
        part: the module that needs it.
        package: the package that is missing.
        extra: the extra that installs it.
    """

    def __init__(self, part: str, package: str, extra: str) -> None:
        super().__init__(
            f"{part}: got no package {package}; expected it installed. Run pip install 'tilerec[{extra}]'."
        )


class ReshardError(TilerecError, RuntimeError):
    """A reshard that stopped midway; raised on every rank. The model still works: some tables moved, others did not."""
