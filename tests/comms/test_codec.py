"""What wire codecs promise: sizes known beforehand, error bounds, nothing hidden."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tilerec.comms.codec import CODECS, Codec, codec
from tilerec.errors import ConfigError
from tilerec.spec.plan import CODECS as PLANNED

NAMES = list(CODECS)
SEGMENTS = [
    [],
    [(0, 3)],
    [(0, 1), (0, 257)],
    [(1, 1)],
    [(1, 3)],
    [(5, 1), (1, 1), (0, 1), (2, 1)],
    [(2, 3), (0, 3), (0, 5), (1, 257), (4, 1), (3, 3), (1, 1)],
    [(64, 16), (64, 16), (1, 16)],
]


def rows_of(segments: list[tuple[int, int]], seed: int = 0, spread: float = 6.0) -> Tensor:
    """Rows of normal values, each row on a scale of its own from 10**-spread to 10**spread."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.randn(count, width, generator=generator)
        * 10 ** (spread * (2 * torch.rand(count, 1, generator=generator) - 1))
        for count, width in segments
    ]
    return torch.cat([row.reshape(-1) for row in rows]) if rows else torch.empty(0)


def bound_of(name: str, flat: Tensor, segments: list[tuple[int, int]]) -> Tensor:
    """The largest error that the codec's documentation admits, per element."""
    size = flat.double().abs()
    if name == "fp16":
        return torch.where(size >= 2**-14, size * 2**-11, 2**-25)
    if name == "bf16":
        return size * 2**-8
    if name in ("int8", "fp8"):
        pieces = size.split([count * width for count, width in segments])
        each = [
            piece.view(count, width).amax(1, keepdim=True).expand(-1, width).reshape(-1)
            for piece, (count, width) in zip(pieces, segments, strict=True)
            if count
        ]
        largest = torch.cat(each) if each else size
        if name == "int8":
            return largest * (1 / 254 + 1e-6)
        return torch.where(size >= largest / 28_672, size / 17, largest / 458_752) * (1 + 1e-6)
    return torch.zeros_like(size)


def through(own: Codec, flat: Tensor, segments: list[tuple[int, int]]) -> Tensor:
    """What arrives; and that the wire is as long as announced."""
    kept = flat.clone()
    wire = own.encode(flat, segments)
    # Encoding leaves the rows alone.
    torch.testing.assert_close(flat, kept, rtol=0.0, atol=0.0, equal_nan=True)
    assert wire.dtype == (own.wire_dtype or flat.dtype)
    assert wire.dim() == 1
    assert wire.is_contiguous()
    assert wire.numel() == sum(count * own.row_elements(width) for count, width in segments)
    assert wire.nbytes == sum(count * own.row_bytes(width, flat.dtype) for count, width in segments)
    arrived = own.decode(wire, segments)
    assert arrived.shape == flat.shape
    return arrived


@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_values_arrive_within_the_documented_error(name: str, segments: list[tuple[int, int]]) -> None:
    flat = rows_of(segments, spread=3.0)
    arrived = through(codec(name), flat, segments)
    error = (arrived.double() - flat.double()).abs()
    assert (error <= bound_of(name, flat, segments)).all()


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 2, 3, 4, 7, 32])), max_size=8),
    st.integers(0, 1000),
    st.sampled_from(NAMES),
)
def test_any_segments_arrive_in_their_order(segments: list[tuple[int, int]], seed: int, name: str) -> None:
    flat = rows_of(segments, seed, spread=2.0)
    arrived = through(codec(name), flat, segments)
    assert ((arrived.double() - flat.double()).abs() <= bound_of(name, flat, segments)).all()


def test_the_bounds_are_not_wider_than_they_must_be() -> None:
    segments = [(4000, 8)]
    flat = rows_of(segments, spread=2.0)
    for name in ("fp16", "bf16", "int8", "fp8"):
        error = (through(codec(name), flat, segments).double() - flat.double()).abs()
        assert (error / bound_of(name, flat, segments)).max() > 0.95


def test_int8_does_what_its_example_says() -> None:
    own = codec("int8")
    wire = own.encode(torch.tensor([1.0, -2.54, 0.01, 0.0]), [(1, 4)])
    assert wire.numel() == 8
    assert wire[:4].view(torch.float32).item() == pytest.approx(0.02)
    assert wire[4:6].tolist() == [50, -127]
    assert wire[7].item() == 0
    assert own.decode(wire, [(1, 4)])[:2].tolist() == pytest.approx([1.0, -2.54])


def test_int8_keeps_the_largest_value_of_a_row_and_rows_apart() -> None:
    flat = torch.tensor([1e-20, 3e-20, 5.0, -7.0, 0.0, 0.0, 1e30, 2e30])
    arrived = through(codec("int8"), flat, [(4, 2)]).view(4, 2)
    expected = torch.tensor([[1e-20, 3e-20], [5.0, -7.0], [0.0, 0.0], [1e30, 2e30]])
    torch.testing.assert_close(arrived.abs().amax(1), expected.abs().amax(1), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(arrived / expected.abs().amax(1, keepdim=True).clamp(min=1e-30),
                               expected / expected.abs().amax(1, keepdim=True).clamp(min=1e-30),
                               rtol=0.0, atol=1 / 253)  # fmt: skip


def test_fp8_keeps_small_values_beside_large_ones() -> None:
    """What int8 makes 0: values a thousandth of the row's largest."""
    flat = torch.tensor([1000.0, 1.0, -0.5, 448.0 / 448])
    arrived = through(codec("fp8"), flat, [(1, 4)])
    torch.testing.assert_close(arrived, flat, rtol=1 / 17, atol=0.0)
    assert through(codec("int8"), flat, [(1, 4)])[1:].tolist() == [0.0, 0.0, 0.0]


def test_fp8_does_what_its_example_says() -> None:
    own = codec("fp8")
    wire = own.encode(torch.tensor([448.0, 1.1, -0.3]), [(1, 3)])
    assert wire[:4].view(torch.float32).item() == 1.0
    assert wire[4:].view(torch.float8_e4m3fn).tolist() == [448.0, 1.125, -0.3125]
    assert own.decode(wire, [(1, 3)]).tolist() == [448.0, 1.125, -0.3125]


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_of_tiny_values_become_zero(name: str) -> None:
    flat = torch.tensor([9e-37, -1e-38, 2e-36, -1e-36])
    arrived = through(codec(name), flat, [(2, 2)])
    assert arrived[:2].tolist() == [0.0, 0.0]
    assert arrived[2].item() == pytest.approx(2e-36)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_own_row_only_and_visibly(bad: float) -> None:
    flat = torch.tensor([1.0, 2.0, 3.0, bad, 5.0, 6.0])
    segments = [(3, 2)]
    for name in ("fp32", "fp16", "bf16"):
        arrived = through(codec(name), flat, segments)
        torch.testing.assert_close(arrived, flat, equal_nan=True)
    for name in ("int8", "fp8"):
        arrived = through(codec(name), flat, segments).view(3, 2)
        assert arrived[1].isnan().all()
        assert arrived[[0, 2]].isfinite().all()


def test_fp16_overflow_is_infinite_and_not_saturated() -> None:
    arrived = through(codec("fp16"), torch.tensor([65_504.0, 65_519.9, 65_520.0, -1e6]), [(2, 2)])
    assert arrived.tolist() == [65_504.0, 65_504.0, float("inf"), float("-inf")]


def test_rows_that_are_not_rounded_are_not_copied_and_keep_their_dtype() -> None:
    for dtype in (torch.float32, torch.float64):
        flat = torch.randn(6, dtype=dtype)
        own = codec("fp32")
        assert own.encode(flat, [(2, 3)]) is flat
        assert own.decode(flat, [(2, 3)]) is flat
        assert own.row_bytes(3, dtype) == 3 * dtype.itemsize


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "fp8"])
def test_float64_rows_arrive_as_rounded_float32(name: str) -> None:
    segments = [(3, 5), (1, 1)]
    flat = rows_of(segments, spread=2.0).double() * (1 + 1e-9)
    arrived = through(codec(name), flat, segments)
    assert arrived.dtype == torch.float32
    # Rounded twice: by way of fp32.
    slack = flat.abs() * 2**-23
    assert ((arrived.double() - flat).abs() <= bound_of(name, flat, segments) + slack).all()


@pytest.mark.parametrize("segments", [[(1, 3)], [(1, 3), (1, 1)], [(2, 3), (1, 1)]], ids=str)
@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_wire_of_bytes_may_begin_anywhere_in_memory(name: str, shift: int, segments: list[tuple[int, int]]) -> None:
    flat = rows_of(segments, spread=1.0)
    wire = codec(name).encode(flat, segments)
    moved = torch.cat([torch.zeros(shift, dtype=wire.dtype), wire])[shift:]
    assert torch.equal(codec(name).decode(moved, segments), codec(name).decode(wire, segments))


def test_segments_that_do_not_hold_the_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="the segments hold 4 elements, the tensor 5"):
        codec("int8").encode(torch.zeros(5), [(2, 2)])
    with pytest.raises(ConfigError, match="the segments hold 12 elements, the tensor 4"):
        codec("int8").decode(torch.zeros(4, dtype=torch.int8), [(2, 2)])


def test_codecs_are_those_that_a_plan_may_name() -> None:
    assert list(PLANNED) == NAMES
    assert all(codec(name).name == name for name in NAMES)
    with pytest.raises(ConfigError, match=r"'mx4' does not exist; use one of fp32, fp16, bf16, int8, fp8"):
        codec("mx4")
