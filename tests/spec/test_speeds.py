"""Speeds: what a file says comes back, and what cannot be is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tilerec.errors import ConfigError
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.spec.speeds import Speeds
from tilerec.spec.topology import Topology


def test_speeds_travel_in_a_topology_file() -> None:
    speeds = default_speeds(Topology(4))
    topology = Topology(4, speeds=speeds)
    again = Topology.from_json(json.loads(json.dumps(topology.to_json())))
    assert again == topology
    assert again.speeds == speeds
    assert hash(again.speeds) == hash(speeds)
    assert Topology.from_json(Topology(4).to_json()).speeds is None


def test_defaults_follow_the_bandwidths_and_say_that_they_are_defaults() -> None:
    slow, fast = (default_speeds(Topology(8, hbm_mem_bw=bw)) for bw in (1e9, 4e9))
    assert slow.lookup_far[2] == pytest.approx(4 * fast.lookup_far[2])
    assert "not measured" in slow.origin
    assert default_speeds(Topology(2, "cpu")).lookup_far[0] > fast.lookup_far[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"route": -1.0}, "got -1.0 in route"),
        ({"call": float("nan")}, "got nan in call"),
        ({"place": (1e-9,)}, "got 1 numbers in place; expected 5"),
        ({"widths": (64, 16, 32, 128, 256)}, "ascending"),
        ({"cache": 1.5}, "got cache=1.5"),
    ],
)
def test_what_is_no_speed_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(default_speeds(Topology(2)), **change)  # type: ignore[arg-type]


def test_files_with_other_names_are_refused() -> None:
    data = default_speeds(Topology(2)).to_json()
    with pytest.raises(ConfigError, match='got unknown "fast"; expected'):
        Speeds.from_json({**data, "fast": 1})
    with pytest.raises(ConfigError, match=r'got an object without "route"; .* Measure again'):
        Speeds.from_json({k: v for k, v in data.items() if k != "route"})
    with pytest.raises(ConfigError, match="expected an object with"):
        Speeds.from_json([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got a dict as speeds"):
        Topology(2, speeds=data)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["widths", "lookup_far"])
@pytest.mark.parametrize("value", [3, "ab", None])
def test_rates_that_are_no_list_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"Speeds JSON: {name}: got .*; expected a list of numbers"):
        Speeds.from_json({**default_speeds(Topology(2)).to_json(), name: value})
