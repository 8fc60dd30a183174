"""The entry of `param_groups` that attached tables share: every way to write a dict reaches the next update."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tilerec.errors import ConfigError
from tilerec.spec.optimizer import SGD
from tilerec.storage.shared_param_group import SharedParamGroup


def _group() -> SharedParamGroup:
    group = SharedParamGroup.of(SGD(lr=0.1))
    assert group.spec().lr == 0.1
    return group


def _ior(group: SharedParamGroup) -> None:
    group |= {"lr": 0.5}


@pytest.mark.parametrize(
    "write",
    [
        lambda group: group.__setitem__("lr", 0.5),
        lambda group: group.update(lr=0.5),
        lambda group: group.update({"lr": 0.5}),
        _ior,
    ],
)
def test_a_write_reaches_the_next_update(write: Callable[[SharedParamGroup], None]) -> None:
    group = _group()
    write(group)
    assert group["lr"] == 0.5
    assert group.spec().lr == 0.5


def test_an_or_in_place_keeps_the_entry() -> None:
    group = other = _group()
    group |= [("lr", 0.5)]
    assert group is other


@pytest.mark.parametrize(
    "take",
    [
        lambda group: group.__delitem__("lr"),
        lambda group: group.pop("lr"),
        lambda group: [group.popitem() for _ in list(group)],
        lambda group: group.clear(),
    ],
)
def test_a_number_that_is_missing_is_named(take: Callable[[SharedParamGroup], None]) -> None:
    group = _group()
    take(group)
    with pytest.raises(ConfigError, match=r"got an entry without \[.*'lr'"):
        group.spec()
    group.update(SharedParamGroup.of(SGD(lr=0.3)))
    assert group.spec().lr == 0.3


def test_pop_returns_the_value_and_heeds_a_default() -> None:
    group = _group()
    assert group.pop("lr") == 0.1
    assert group.pop("lr", None) is None
    with pytest.raises(KeyError):
        group.pop("lr")
