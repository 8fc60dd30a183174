"""Formulas of seconds, each against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tilerec.planner.cost.rates import Rates
from tilerec.spec.speeds import PER_WIDTH, SINGLE, Speeds

NONE = dict.fromkeys(SINGLE, 0.0)
WIDTHS = (16, 32, 64, 128)
FAR, NEAR, BAG = (10.0, 14.0, 30.0, 40.0), (1.0, 2.0, 3.0, 7.0), (4.0, 5.0, 9.0, 11.0)
SPEEDS = Speeds(
    **dict.fromkeys(PER_WIDTH, NEAR)
    | {"lookup_far": FAR, "lookup_bag": BAG, "update_far": FAR, "update_id": (0.5, 0.25, 2.0, 3.0)},
    **NONE | {"link_in": 3.0, "link_out": 5.0, "network_in": 7.0, "network_out": 11.0, "copy": 0.25},  # type: ignore[arg-type]
    cache=0, widths=WIDTHS,
)  # fmt: skip


def test_a_rate_is_flat_below_the_first_width_linear_between_widths_and_in_proportion_above() -> None:
    rates = Rates(SPEEDS)
    widths = [0.0, 1.0, 16.0, 20.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0]
    found = rates.at("lookup_far", widths)
    assert found.tolist() == pytest.approx([10, 10, 10, 11, 14, 22, 30, 35, 40, 80])
    assert float(rates.at("lookup_far", 127.5)) == pytest.approx(np.interp(127.5, WIDTHS, FAR))


def test_a_lookup_reads_rows_by_their_bytes_and_writes_bags_by_their_columns() -> None:
    """10 ids, 3 of them far, into 2 bags: 64 columns of bf16 are as many bytes as 32 of fp32."""
    rates = Rates(SPEEDS)
    assert float(rates.lookup(10.0, 3.0, 2.0, 64.0, 2)) == pytest.approx(3 * 14 + 7 * 2 + 2 * 9)
    assert float(rates.lookup(2.0, 3.0, 0.0, 64.0, 4)) == pytest.approx(3 * 30)  # no ids below none are near


def test_an_update_sorts_ids_reads_bags_and_changes_rows_with_their_state() -> None:
    """6 ids of 5 bags on 4 rows, 1 of them far. 32 columns and as much state are 64; state per row: half a row."""
    rates = Rates(SPEEDS)
    sums = 6 * 0.25 + 5 * 2.0
    assert float(rates.update(6.0, 5.0, 4.0, 1.0, 32.0, 4, 0, 0)) == pytest.approx(sums + 14 + 3 * 2)
    assert float(rates.update(6.0, 5.0, 4.0, 1.0, 32.0, 4, 4, 0)) == pytest.approx(sums + 30 + 3 * 3)
    assert float(rates.update(6.0, 5.0, 4.0, 1.0, 32.0, 4, 0, 4)) == pytest.approx(sums + 14 + 5 + 3 * 2)
    assert float(rates.update(6.0, 5.0, 4.0, 1.0, 32.0, 4, 0, 1)) == pytest.approx(sums + 14 + 5 + 3 * 2)
    assert float(rates.update(0.0, 0.0, 2.0, 4.0, 32.0, 4, 0, 0)) == pytest.approx(4 * 14)


@pytest.mark.parametrize("network", [False, True])
def test_an_exchange_takes_the_longer_direction_of_a_duplex_link_and_both_of_another(network: bool) -> None:
    inward, out = (7.0, 11.0) if network else (3.0, 5.0)
    for sent, received in ((10.0, 1.0), (1.0, 10.0)):
        simple = float(Rates(SPEEDS).exchanged(sent, received, network=network))
        duplex = float(Rates(dataclasses.replace(SPEEDS, duplex=True)).exchanged(sent, received, network=network))
        assert simple == sent * out + received * inward
        assert duplex == max(sent * out, received * inward)
    assert float(Rates(SPEEDS).exchanged(1.0, 1.0)) == 8.0  # of a host's links, unless the network is named


def test_a_copy_goes_by_bytes() -> None:
    assert Rates(SPEEDS).copied([0, 8]).tolist() == [0.0, 2.0]
