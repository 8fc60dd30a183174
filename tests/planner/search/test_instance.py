"""The planner's problem: what it refuses, and what an arrangement costs, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tilerec.errors import ConfigError
from tilerec.planner.search.instance import SHARE, Instance, evaluate, fits, portion


def two_hosts(**more: object) -> Instance:
    """2 tables, 4 ranks on hosts (0, 1) and (2, 3). Options: one rank, a host, every rank, two ranks."""
    width = np.tile(np.array([1, 2, 4, 1]), (2, 1))
    pieces = np.tile(np.array([1, 1, 1, 2]), (2, 1))
    cost = np.tile(np.array([80, 40, 20, 50])[None, :, None], (2, 1, 2))
    cost[1] *= 2
    given: dict[str, object] = {
        "names": ["a", "b"],
        "width": width,
        "pieces": pieces,
        "cost": cost,
        "home": np.ones_like(cost),
        "memory": cost[:, :, :1].copy(),
        "cap": np.full((4, 1), 200),
        "host_of": np.array([0, 0, 1, 1]),
        **more,
    }
    return Instance(**given)  # type: ignore[arg-type]


def test_the_slowest_rank_of_each_stage_counts_and_home_is_borne_by_all() -> None:
    found = evaluate(two_hosts(), np.array([0, 3]), [(0,), (1, 2)])
    # a: 80 on rank 0. b: 100 on ranks 1 and 2. Home: 1 + 1.
    assert found.load[:, 0].tolist() == [82, 102, 102, 2]
    assert found.cost == 102 + 102
    assert found.memory[:, 0].tolist() == [80, 100, 100, 0]


def test_pieces_of_a_host_lie_on_all_its_ranks_and_uniform_ones_everywhere() -> None:
    found = evaluate(two_hosts(), np.array([1, 2]), [(1,), ()])
    assert found.load[:, 1].tolist() == [42, 42, 82, 82]
    assert found.memory[:, 0].tolist() == [40, 40, 80, 80]


def test_memory_at_home_is_taken_on_every_rank_wherever_the_pieces_lie() -> None:
    at_home = np.zeros((2, 4, 1), np.int64)
    at_home[0, 0], at_home[1, 3], at_home[1, 2] = 3, 4, 5
    instance = two_hosts(home_memory=at_home)
    assert evaluate(instance, np.array([0, 3]), [(0,), (1, 2)]).memory[:, 0].tolist() == [87, 107, 107, 7]
    assert evaluate(instance, np.array([0, 2]), [(0,), ()]).memory[:, 0].tolist() == [128, 48, 48, 48]


def test_a_shared_stage_is_the_mean_of_a_host_rounded_up() -> None:
    instance = two_hosts(shared=np.array([False, True]), base_cost=np.array([[0, 1], [0, 0], [0, 0], [0, 0]]))
    found = evaluate(instance, np.array([0, 0]), [(0,), (2,)])
    assert found.load[:, 1].tolist() == [43, 43, 82, 82]  # ceil((80 + 2 + 2 + 2 * 0 + 1) / 2), (160 + 4) / 2


def test_a_slow_rank_takes_longer_for_what_lies_on_it() -> None:
    slow = np.full((4, 2), 1000)
    slow[0] = 1500
    instance = two_hosts(slow=slow, base_cost=np.full((4, 2), 7))
    found = evaluate(instance, np.array([0, 2]), [(0,), ()])
    assert found.load[0].tolist() == [7 + (80 + 40) * 3 // 2 + 2] * 2
    assert found.load[1].tolist() == [7 + 42] * 2


def test_a_rank_bears_as_much_of_home_as_its_reach_says() -> None:
    reach = np.full((4, 2), 1000)
    reach[0], reach[3] = 250, 0
    instance = two_hosts(reach=reach, home=np.full((2, 4, 2), 33), base_cost=np.full((4, 2), 7))
    found = evaluate(instance, np.array([0, 2]), [(0,), ()])
    # Home: 33 + 33, of which rank 0 bears ceil(66 / 4). Pieces and what is there already stay as they are.
    assert found.load[:, 0].tolist() == [7 + 80 + 40 + 17, 7 + 40 + 66, 7 + 40 + 66, 7 + 40]
    shared = two_hosts(reach=reach, home=np.full((2, 4, 2), 33), shared=np.array([False, True]))
    found = evaluate(shared, np.array([0, 0]), [(0,), (2,)])
    assert found.load[:, 1].tolist() == [82, 82, 113, 113]  # ceil((80 + 17 + 66) / 2), (160 + 66 + 0) / 2


def test_a_charge_is_paid_once_if_any_table_uses_it() -> None:
    uses = np.zeros((2, 4, 2), np.bool_)
    uses[:, 0, 0] = True
    uses[:, 2, 1] = True
    instance = two_hosts(uses=uses, charge=np.array([1000, 5000]))
    both = evaluate(instance, np.array([0, 0]), [(0,), (1,)])
    assert both.cost == int(both.stage.sum()) + 1000
    assert evaluate(instance, np.array([0, 2]), [(0,), ()]).cost > 6000


def test_uneven_shares_move_cost_and_memory_and_their_sum_stays() -> None:
    divisible = np.zeros((2, 4), np.bool_)
    divisible[:, 1:] = True
    instance = two_hosts(divisible=divisible)
    shares = np.array([SHARE // 2, SHARE // 4, SHARE // 4, 0])
    found = evaluate(instance, np.array([0, 2]), [(3,), ()], {1: shares})
    assert found.load[:, 0].tolist() == [82, 42, 42, 82]
    pair = evaluate(instance, np.array([0, 3]), [(3,), (0, 2)], {1: np.array([SHARE // 4, SHARE - SHARE // 4])})
    assert pair.memory[:, 0].tolist() == [50, 0, 150, 80]
    host = evaluate(instance, np.array([0, 1]), [(3,), (0,)], {1: np.array([SHARE, 0])})
    assert host.memory[:, 0].tolist() == [160, 0, 0, 80]


def test_what_a_part_takes_in_any_case_does_not_go_with_its_share() -> None:
    divisible = np.zeros((2, 4), np.bool_)
    divisible[:, 2] = True
    fixed = np.where(divisible[:, :, None], np.array([0, 10]), 0)
    instance = two_hosts(divisible=divisible, fixed=fixed)
    even, uneven = (
        evaluate(instance, np.array([0, 2]), [(3,), ()], {1: np.array(shares) * SHARE // 4})
        for shares in ([1, 1, 1, 1], [2, 2, 0, 0])
    )
    assert even.load.tolist() == evaluate(instance, np.array([0, 2]), [(3,), ()]).load.tolist()
    # Of 40 on each rank 10 stay; home adds 2.
    assert uneven.load[:, 1].tolist() == [72, 72, 12, 92]
    assert uneven.load[:, 0].tolist() == [82, 82, 2, 82]


def test_portions_round_up_and_stay_within_int64() -> None:
    whole = np.array([2**52, 3])
    parts = portion(whole, np.array([1, SHARE - 1]))
    assert parts.tolist() == [[2**32, 1], [2**52 - 2**32, 3]]


def test_caps_hold_for_ranks_and_for_hosts() -> None:
    instance = two_hosts(host_cap=np.array([[150], [300]]))
    assert fits(instance, np.array([[100], [50], [200], [100]]))
    assert not fits(instance, np.array([[100], [51], [0], [0]]))
    assert not fits(instance, np.array([[0], [0], [201], [0]]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"names": ["a", "a"]}, "different names"),
        ({"cap": np.full((3, 1), 200)}, r"cap is int64 \(3, 1\)"),
        ({"cost": np.full((2, 4, 2), -1)}, "cost holds -1"),
        ({"cost": np.ones((2, 4, 2))}, "cost is float64"),
        ({"slow": np.zeros((4, 2), np.int64)}, "slow holds 0"),
        ({"reach": np.full((4, 2), -1)}, "reach holds -1"),
        ({"width": np.full((2, 4), 3)}, "Table 'a': option 0 has width 3"),
        ({"pieces": np.full((2, 4), 2)}, "Table 'a': option 2 has 2 pieces"),
        ({"pieces": np.zeros((2, 4), np.int64)}, "has 0 pieces"),
        ({"fixed": np.full((2, 4, 2), 50)}, "fixed is a part of cost"),
        ({"host_of": np.array([0, 0, 2, 2])}, "host 1 has no rank"),
        ({"allowed": np.ones((2, 3), np.bool_)}, "allowed is bool"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        two_hosts(**more)


def test_taking_tables_in_another_order_takes_all_that_is_theirs() -> None:
    instance = two_hosts(allowed=np.array([[True] * 4, [False, True, True, True]]))
    turned = instance.take(np.array([1, 0]))
    assert turned.names == ("b", "a")
    assert turned.cost[0].tolist() == instance.cost[1].tolist()
    assert turned.allowed is not None
    assert turned.allowed[0].tolist() == [False, True, True, True]
