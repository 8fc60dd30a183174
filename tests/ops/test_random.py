"""Counter-based random numbers: the published answers, and bits that depend on the place alone."""

import math

import pytest
import torch

from tests.ops.random_ops import random_fill_reference_, random_rows_reference_
from tilerec.errors import ConfigError
from tilerec.ops import backends  # noqa: F401
from tilerec.ops.random.definition import (
    philox,
    random_words,
    stochastic_round,
    table_key,
)

KEY = [0x1234ABCD, 0xDEADBEEF]


def _philox(counter: list[int], key: list[int]) -> list[int]:
    return [int(x) for x in philox(tuple(torch.tensor([c]) for c in counter), key)]  # type: ignore[arg-type]


def test_philox_gives_the_published_answers() -> None:
    """Known answers of the Random123 distribution for Philox4x32-10."""
    ones = 0xFFFFFFFF
    assert _philox([0] * 4, [0, 0]) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _philox([ones] * 4, [ones, ones]) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert _philox(digits, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("rows", "columns"), [((3, 9), (0, 7)), ((0, 11), (1, 4)), ((10, 11), (5, 19)), ((4, 4), (2, 3))]
)
def test_a_tile_has_the_bits_of_the_whole_table(kind, dtype, rows, columns) -> None:
    whole = torch.empty(11, 19, dtype=dtype)
    torch.ops.tilerec.random_fill_(whole, KEY, 0, 0, kind, -0.5, 2.0)
    tile = torch.empty(rows[1] - rows[0], columns[1] - columns[0], dtype=dtype)
    torch.ops.tilerec.random_fill_(tile, KEY, rows[0], columns[0], kind, -0.5, 2.0)
    assert torch.equal(tile, whole[rows[0] : rows[1], columns[0] : columns[1]])


@pytest.mark.parametrize("offset", [0, 2**31 - 3, 2**32 - 2, 2**40])
def test_the_fill_equals_the_reference_at_any_row(offset: int) -> None:
    got, want = torch.empty(5, 6), torch.empty(5, 6)
    torch.ops.tilerec.random_fill_(got, KEY, offset, 3, "uniform", -1.0, 1.0)
    random_fill_reference_(want, KEY, offset, 3, "uniform", -1.0, 1.0)
    assert torch.equal(got, want)
    assert not torch.equal(got[0], got[1])


def test_values_have_the_asked_distribution() -> None:
    x = torch.empty(2000, 50)
    torch.ops.tilerec.random_fill_(x, KEY, 0, 0, "uniform", -1.0, 3.0)
    assert x.min() >= -1
    assert x.max() < 3
    assert x.mean().item() == pytest.approx(1.0, abs=0.02)
    assert x.var().item() == pytest.approx(16 / 12, rel=0.02)
    torch.ops.tilerec.random_fill_(x, KEY, 0, 0, "normal", 2.0, 0.5)
    assert x.mean().item() == pytest.approx(2.0, abs=0.01)
    assert x.std().item() == pytest.approx(0.5, rel=0.02)


def test_tables_of_other_names_and_seeds_differ() -> None:
    keys = [tuple(table_key(seed, name)) for seed in (1, 2, 2**40 + 1) for name in ("a", "b")]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0 + 2**-13, -3.14159, 0.1, 2.0**-20 * 1.37, -(2.0**-16) * 1.001, 0.0, 123.456])
    rows = torch.arange(40_000)
    words = random_words(rows, x.numel(), KEY, 0, 1)
    rounded = stochastic_round(x.expand(rows.numel(), -1), words, dtype).double()
    low, high = rounded.amin(0), rounded.amax(0)
    exact = x.double()
    assert torch.all((low <= exact) & (exact <= high))
    step = (high - low).clamp(min=1e-30)
    assert torch.all(((rounded.mean(0) - exact) / step).abs() < 0.02)
    for column in range(x.numel()):
        assert rounded[:, column].unique().numel() <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_leaves_exact_and_special_values(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf"), float("nan"), 2.0**-24]])
    words = random_words(torch.arange(1), 8, KEY, 0, 9)
    got = stochastic_round(x, words, dtype)
    want = x.to(dtype)
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_random_fill_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.tilerec.random_fill_, (torch.zeros(3, 5), KEY, 0, 0, "uniform", 0.0, 1.0))


@pytest.mark.parametrize("fill", [random_fill_reference_, torch.ops.tilerec.random_fill_])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "cauchy"}, "kind 'cauchy' is not 'uniform' or 'normal'"),
        ({"key": [1]}, "a key of 1 words; expected 2"),
        ({"key": [1, 2, 3]}, "a key of 3 words; expected 2"),
        ({"row_offset": -1}, "a tile at row -1, column 0"),
        ({"column_offset": -8}, "a tile at row 0, column -8"),
        ({"column_offset": 2**34}, "fewer than 2.34 columns"),
        ({"out": torch.zeros(8)}, r"shape \[8\] and type torch.float32; expected floating"),
        ({"out": torch.zeros(2, 2, 2)}, r"shape \[2, 2, 2\]"),
        ({"out": torch.zeros(2, 2, dtype=torch.int64)}, "type torch.int64; expected floating"),
    ],
)
def test_a_tile_that_has_no_place_in_a_table_is_refused(fill, changed, message) -> None:
    arguments = {
        "out": torch.zeros(4, 4),
        "key": KEY,
        "row_offset": 0,
        "column_offset": 0,
        "kind": "uniform",
    } | changed
    with pytest.raises(ConfigError, match=message):
        fill(*arguments.values(), 0.0, 1.0)
    assert not arguments["out"].any()


@pytest.mark.parametrize("fill", [random_fill_reference_, torch.ops.tilerec.random_fill_])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_a_tile_of_nothing_is_filled(fill, shape, kind) -> None:
    fill(torch.zeros(shape), KEY, 3, 5, kind, 0.0, 1.0)


@pytest.mark.parametrize("fill", [random_rows_reference_, torch.ops.tilerec.random_rows_])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("columns", [(0, 8), (0, 3), (5, 19), (2, 2), (7, 8)])
def test_rows_anywhere_have_the_bits_of_the_whole_table(fill, kind, dtype, columns) -> None:
    whole = torch.zeros(40, 19, dtype=dtype)
    (random_fill_reference_ if fill is random_rows_reference_ else torch.ops.tilerec.random_fill_)(
        whole, KEY, 0, 0, kind, -0.5, 2.0
    )
    rows = torch.tensor([39, 0, 7, 7, 38, *range(20)])
    tile = torch.zeros(25, columns[1] - columns[0], dtype=dtype)
    fill(tile, rows, KEY, columns[0], kind, -0.5, 2.0)
    assert torch.equal(tile, whole[rows, columns[0] : columns[1]])


@pytest.mark.parametrize("fill", [random_rows_reference_, torch.ops.tilerec.random_rows_])
@pytest.mark.parametrize("rows", [torch.tensor([1]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[1, 2]])])
def test_rows_of_other_numbers_than_the_tile_has_are_refused(fill, rows) -> None:
    tile = torch.zeros(2, 4)
    with pytest.raises(ConfigError, match=r"expected int64 \[2\]"):
        fill(tile, rows, KEY, 0, "uniform", 0.0, 1.0)
    assert not tile.any()


def test_random_rows_pass_opcheck() -> None:
    arguments = (torch.zeros(3, 5), torch.tensor([4, 1, 4]), KEY, 0, "uniform", 0.0, 1.0)
    torch.library.opcheck(torch.ops.tilerec.random_rows_, arguments)


def test_stochastic_rounding_to_e4m3_ends_at_its_largest_number() -> None:
    """It has no infinity; between 448 and where 480 would be, every word gives 448."""
    x = torch.tensor([[0.0, -0.0, 1.0, -2.5, 2.0**-9, 448.0, 470.0, -1e9, float("inf"), float("nan")]])
    for row in range(5):
        words = random_words(torch.tensor([row]), 10, KEY, 0, 9)
        got = stochastic_round(x, words, torch.float8_e4m3fn).float()[0].tolist()
        assert got[:9] == [0.0, -0.0, 1.0, -2.5, 2.0**-9, 448.0, 448.0, -448.0, 448.0]
        assert math.isnan(got[9])
