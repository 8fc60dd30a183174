"""Settings that other libraries have and that mean nothing here: taken, so that a script runs, and named."""

from __future__ import annotations

import warnings
from collections.abc import Mapping


def warn_without_effect(what: str, given: Mapping[str, object], why: Mapping[str, str], depth: int) -> None:
    """One warning that names the settings which were given, each with the reason and what to say in its place.

    Args:
        what: has the settings: "Table 'user'".
        given: setting -> value. None and False are not given.
        why: setting -> the reason.
        depth: calls between the caller of this and the user's line, as of `warnings.warn`'s `stacklevel`.
    """
    said = [name for name, value in given.items() if value is not None and value is not False]
    if said:
        reasons = "; ".join(f"{name} ({why[name]})" for name in said)
        warnings.warn(
            f"{what}: without effect here: {reasons}. Leave {'them' if len(said) > 1 else 'it'} out.",
            stacklevel=depth + 1,
        )
