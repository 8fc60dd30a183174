"""Cases of sparse tensors and single ops: permutations, padding, buckets, packing, random numbers, hashes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.golden import inputs
from tests.golden.digest import digest
from tests.golden.inputs import Numbers
from tests.golden.training import Marks
from tilerec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tilerec.comms import CODECS, codec
from tilerec.data import hash_rows, hash_values
from tilerec.testing import concat_batches, random_batch, split_batch

OPS = torch.ops.tilerec
KEY = [0x12345678, 0x9ABCDEF0]


def _parts(batch: KeyedJaggedTensor) -> list[Any]:
    """All that a batch holds."""
    return [batch.keys(), batch.values(), batch.lengths(), batch.offsets(), batch.weights_or_none()]


def keyed(weighted: bool, variable: bool) -> Marks:
    """Permute, split, join, and take apart a keyed jagged tensor."""
    rows = {"a": 9, "b": 100, "c": 5, "d": 17}
    batches = [inputs.batch(rows, 6, 3, turn, weighted=weighted, variable=variable) for turn in (0, 1)]
    first = batches[0]
    marks = {
        "permute": digest(_parts(first.permute([2, 0, 3]))),
        "split": digest([_parts(part) for part in first.split([1, 2, 1])]),
        "flatten": digest(_parts(first.flatten_lengths())),
        "dict": digest({key: [jt.values(), jt.lengths()] for key, jt in first.to_dict().items()}),
        "concat": digest(_parts(concat_batches(batches))),
        "apart": digest([_parts(part) for part in split_batch(concat_batches(batches), [6, 6])]),
    }
    if not variable:
        others = inputs.batch({"e": 4, "f": 6}, 6, 4, weighted=weighted)
        marks["join"] = digest(_parts(KeyedJaggedTensor.concat([first, others])))
    return marks


def jagged() -> Marks:
    """From and to dense and padded tensors, with gradients."""
    numbers = Numbers(31)
    rows = [numbers.eighths(count, 3) for count in (2, 0, 4, 1)]
    made = JaggedTensor.from_dense(rows)
    values = made.values().clone().requires_grad_()
    padded = JaggedTensor(values, lengths=made.lengths()).to_padded_dense(3, 0.5)
    padded.backward(numbers.eighths(*padded.shape))
    dense = JaggedTensor.from_dense_lengths(numbers.eighths(3, 4), torch.tensor([4, 0, 2]))
    return {
        "padded": digest([padded, values.grad]),
        "dense": digest([made.values(), made.lengths(), dense.values(), dense.to_dense()]),
    }


def regrouped() -> Marks:
    """Columns of keyed tensors in another order, with gradients."""
    numbers = Numbers(32)
    leaves = [numbers.eighths(5, width).requires_grad_() for width in (7, 12)]
    tensors = [KeyedTensor(["a", "b"], [3, 4], leaves[0]), KeyedTensor(["c", "d", "e"], [8, 1, 3], leaves[1])]
    groups = KeyedTensor.regroup(tensors, [["e", "a"], ["c"], ["b", "d", "a"]])
    torch.autograd.backward(groups, [numbers.eighths(*group.shape) for group in groups])
    return {"regroup": digest([groups, *(leaf.grad for leaf in leaves)])}


def segments() -> Marks:
    """The ops under sparse tensors, with gradients."""
    numbers = Numbers(33)
    lengths = torch.tensor([3, 0, 2, 5, 0, 1])
    offsets = OPS.offsets_from_lengths(lengths)
    total = int(lengths.sum())
    values = numbers.eighths(total, 3).requires_grad_()
    order = torch.tensor([5, 3, 0, 3])
    taken = OPS.offsets_from_lengths(lengths[order])
    outputs = [
        OPS.select_segments(values, offsets, order, taken, int(taken[-1])),
        OPS.segment_sum(values, offsets),
        OPS.repeat_segments(values[: len(lengths)], offsets, total),
        OPS.jagged_to_padded(values, offsets, 4, 0.5),
    ]
    torch.autograd.backward(outputs, [numbers.eighths(*y.shape) for y in outputs])
    ids = numbers.ids(total, 60)
    return {
        "ops": digest([offsets, OPS.segment_ids(offsets, total), *outputs, values.grad]),
        "bucketize": digest(OPS.bucketize_by_cuts(ids, lengths, torch.tensor([0, 7, 7, 31, 60]))),
    }


def packed() -> Marks:
    """Rows on the wire and back, in every number format, with rows that are zero, large, or not finite."""
    numbers = Numbers(34)
    scales = [1.0, 2.0**-20, 2.0**12, 0.0]
    rows = torch.cat([numbers.eighths(2, 9, most=999) * scale for scale in scales] + [numbers.eighths(3, 9)])
    rows[-1, 3] = float("inf")
    flat, counts = rows.reshape(-1), [(5, 9), (6, 9)]
    marks = {}
    for name in CODECS:
        wire = codec(name).encode(flat.clone(), counts)
        back = codec(name).decode(wire, counts)
        # A row that is not finite arrives as NaNs; which NaN is left open.
        marks[name] = digest([back.nan_to_num(7.0, 8.0, 9.0)])
        if name in ("int8", "fp8"):
            marks[f"{name}_bytes"] = digest(codec(name).encode(flat[:-9].clone(), [(10, 9)]))
    return marks


def random(kind: str, dtypes: Sequence[torch.dtype]) -> Marks:
    """Philox numbers by their place: whole tables, tiles of them, single rows, rows that begin anew."""
    marks = {}
    for dtype in dtypes:
        whole, tile = torch.zeros(37, 21, dtype=dtype), torch.zeros(9, 6, dtype=dtype)
        OPS.random_fill_(whole, KEY, 0, 0, kind, -0.5, 0.75)
        OPS.random_fill_(tile, KEY, 2**33 + 5, 7, kind, -0.5, 0.75)
        rows = torch.zeros(4, 6, dtype=dtype)
        OPS.random_rows_(rows, torch.tensor([3, 2**33 + 8, 0, 3]), KEY, 7, kind, -0.5, 0.75)
        marks[str(dtype).removeprefix("torch.")] = digest([whole, tile, rows])
    return marks


def renewed() -> Marks:
    """Rows and their state that begin anew."""
    table, state = torch.full((20, 6), 9.0), [torch.full((20,), 9.0), torch.full((20, 6), 9.0)]
    rows = torch.tensor([105, -1, 119, 105, 300, 100])
    OPS.renew_rows_(rows, table, state, 100, 4, KEY, -0.5, 0.5, [0.0, 0.25])
    return {"rows": digest([table, state])}


def hashed() -> Marks:
    """Hashes of ids and of bytes, and the buckets of managed collision."""
    ids = np.array([0, 1, -1, 7, 2**40 + 3, -(2**62)], dtype=np.int64)
    wide = torch.tensor([0, 1, -1, 7, 2**40 + 3, -(2**62), 2**63 - 1])
    return {
        "values": digest(hash_values(ids).tobytes()),
        "rows": digest(hash_rows(ids, 1000).tobytes()),
        "buckets": digest([OPS.zch_buckets(wide, count) for count in (1, 7, 768)]),
    }


def batches() -> Marks:
    """Random batches for tests."""
    made = [
        random_batch(["a", "b"], [50, 9], 7, exponent=exponent, weighted=True, variable=variable, seed=5)
        for exponent in (0.0, 1.05)
        for variable in (False, True)
    ]
    return {"random_batch": digest([_parts(batch) for batch in made])}


_FLOATS: tuple[torch.dtype, ...] = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn,
)  # fmt: skip


def _stochastic() -> Marks:
    """Updates of small steps, so that most rows are rounded at random, in every type that is rounded."""
    numbers = Numbers(35)
    marks = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        table: Tensor = (numbers.eighths(30, 12) * 0.75).to(dtype)
        gradient = numbers.eighths(8, 12)
        ids = numbers.ids(8, 30)
        hyper = [2.0**-10, 1.0, 0.0, 1.0, 0.0, 0.0]
        for count in (1, 2, 3):
            OPS.update_rows_(
                [table], [], gradient, ids, None, None, [0], [0], [8], [0], [12], [0], "sgd", hyper, [count],
                KEY, [100], [3],
            )  # fmt: skip
        marks[str(dtype).removeprefix("torch.")] = digest(table)
    return marks


CASES: dict[str, Callable[[], Marks]] = {
    "kernels/keyed": lambda: keyed(False, False),
    "kernels/keyed-weighted": lambda: keyed(True, False),
    "kernels/keyed-variable": lambda: keyed(True, True),
    "kernels/jagged": jagged,
    "kernels/regrouped": regrouped,
    "kernels/segments": segments,
    "kernels/packed": packed,
    "kernels/random-uniform": lambda: random("uniform", _FLOATS),
    "kernels/random-normal": lambda: random("normal", _FLOATS),
    "kernels/renewed": renewed,
    "kernels/hashed": hashed,
    "kernels/batches": batches,
    "kernels/stochastic": _stochastic,
}
