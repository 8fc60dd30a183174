"""TOML text: tomllib reads back any document, and comments stand above their settings."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import ConfigError
from tilerec.train.toml_text import toml_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

text = st.text(st.characters(codec="utf-8"), max_size=6)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text
plain = scalars | st.lists(scalars, max_size=3)
tables = st.dictionaries(text, plain, max_size=3)
inner = plain | tables | st.lists(tables, min_size=1, max_size=3)
values = inner | st.dictionaries(text, inner, max_size=3)


@given(st.dictionaries(text, values, max_size=4), text)
def test_any_document_is_read_back_equal(document: dict[str, Any], comment: str) -> None:
    comments = dict.fromkeys(document, comment)
    assert tomllib.loads(toml_text(document, comments)) == document


def test_comments_stand_above_settings_tables_and_elements() -> None:
    document = {"a": {"b": 1, "c": [{"d": 2}, {"d": math.inf}]}}
    comments = {"a": "the table", "a.b": "one\ntwo\x1b[2J", "a.c": "all", "a.c[1]": "last"}
    assert toml_text(document, comments) == (
        "# the table\n[a]\n# one\n# two?[2J\nb = 1\n\n# all\n[[a.c]]\nd = 2\n\n# last\n[[a.c]]\nd = inf\n"
    )


def test_values_that_toml_lacks_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"a\.b: got NoneType"):
        toml_text({"a": {"b": None}})
