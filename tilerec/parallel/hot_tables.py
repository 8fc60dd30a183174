"""Tables that cannot have hot rows, refused by name."""

from __future__ import annotations

from tilerec.errors import ConfigError
from tilerec.parallel.model_tables import table_word


def refused(path: str, name: str, why: str, instead: str = "") -> ConfigError:
    """Return the error for a table with hot rows. why: what it cannot be together with."""
    return ConfigError(
        f"table {table_word((path, name))}: got hot rows with {why}; expected one of the two. Leave hot= out of its "
        f"ParameterSharding{instead}."
    )
