"""Read-only lookup of ids: `zch_buckets` and `zch_find`. Terms as in `definition.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from tilerec.ops.hash.checks import check_buckets, check_find
from tilerec.ops.hash.place import by_bucket, high, local_buckets, low, mixed, tensor_like, window_of
from tilerec.ops.runtime.library import LIBRARY


@LIBRARY.op(
    "zch_buckets(Tensor ids_N, int buckets) -> Tensor",
    lambda ids_N, buckets: torch.empty_like(ids_N),
    check=check_buckets,
    check_fake=True,
)
def zch_buckets_reference(ids_N: Tensor, buckets: int) -> Tensor:
    """Return the bucket of every id, int64.

    ids [0, 1, -1], 768 buckets -> [0, 259, 542]: mixed are 0, 0x5692161d100b05e5, 0xb4d055fcf2cbbd7b
    """
    return high(mixed(ids_N), buckets)


@LIBRARY.op(
    "zch_find(Tensor ids_N, Tensor ids_E, Tensor used_E, int first, int buckets, int slots, int max_probe)"
    " -> (Tensor, Tensor)",
    lambda ids_N, *_: (torch.empty_like(ids_N), torch.empty_like(ids_N, dtype=torch.int32)),
    check=check_find,
    check_fake=True,
)
def zch_find_reference(
    ids_N: Tensor, ids_E: Tensor, used_E: Tensor, first: int, buckets: int, slots: int, max_probe: int
) -> tuple[Tensor, Tensor]:
    """Return the row of every id (int64, numbered over the whole table; -1: none), and the probes (int32). Read-only.

    1 bucket of 4 slots holds [1, -, 8, 3], max_probe 3. 8 starts at slot 2: row 2, 1 probe. 2 starts at slot 0, and
    slot 1 is empty: row -1, 2 probes. 5 starts at slot 2 and is in none of 2, 3 and 0: row -1, 3 probes.
    """
    mixed_N = mixed(ids_N)
    bucket_N = local_buckets("zch_find", ids_N, mixed_N, first, ids_E.shape[0] // slots, buckets)
    ids, starts = ids_N.tolist(), low(mixed_N, slots).tolist()
    rows, probes = [-1] * len(ids), [0] * len(ids)
    for bucket, positions in by_bucket(bucket_N):
        here = slice(bucket * slots, (bucket + 1) * slots)
        bucket_ids, used = ids_E[here].tolist(), used_E[here].tolist()
        for n in positions:
            for slot in window_of(starts[n], slots, max_probe):
                probes[n] += 1
                if not used[slot]:
                    break
                if bucket_ids[slot] == ids[n]:
                    rows[n] = (first + bucket) * slots + slot
                    break
    return tensor_like(rows, torch.int64, ids_N), tensor_like(probes, torch.int32, ids_N)
