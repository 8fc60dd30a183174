"""Warnings about settings of other libraries that have no effect here. They are accepted, so that scripts run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping


def warn_ignored_settings(what: str, given: Mapping[str, object], why: Mapping[str, str], depth: int) -> None:
    """Issue one warning that lists the given settings, each with the reason and the alternative.

    Args:
        what: the object that has the settings: "Table 'user'".
        given: setting -> value. None and False count as not given.
        why: setting -> the reason.
        depth: calls from the caller of this function to the user's line, as `stacklevel` of `warnings.warn`.
    """
    passed = [name for name, value in given.items() if value is not None and value is not False]
    if passed:
        reasons = "; ".join(f"{name} ({why[name]})" for name in passed)
        warnings.warn(
            f"{what}: got settings without effect: {reasons}. Leave {'them' if len(passed) > 1 else 'it'} out.",
            stacklevel=depth + 1,
        )
