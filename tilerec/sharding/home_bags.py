"""Local work of a home rank on the bags of its batch, after their rows have arrived.

Legend: B samples, D columns of a read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilerec.modules.feature_reads import FeatureRead
from tilerec.modules.id_clamp import key_starts
from tilerec.modules.inverse_indices import check_samples, sample_bags
from tilerec.ops.backends import reused_empty
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def check_variable(who: str, reads: Sequence[FeatureRead], features: KeyedJaggedTensor) -> None:
    """Raise an `InputError` for a variable batch whose samples have no bags; `who`: name of the module."""
    if features.variable_stride_per_key():
        check_samples(who, [read.feature for read in reads], features)


def rows_of_samples(
    reads: Sequence[FeatureRead], features: KeyedJaggedTensor, flat: Tensor, bags: Sequence[int]
) -> Tensor:
    """Return the rows of each sample of a variable batch, [B, sum of dims].

    Args:
        flat: the rows of each read's bags, read after read.
        bags: number of bags per read.
    """
    bag_of = sample_bags(features)  # checked before the batch was routed
    parts = flat.split([count * read.dim for count, read in zip(bags, reads, strict=True)])
    blocks = [
        part.view(count, read.dim)[bag_of[read.feature]] for part, count, read in zip(parts, bags, reads, strict=True)
    ]
    return torch.cat(blocks, dim=1)


def pooled_at_home(
    reads: Sequence[FeatureRead], features: KeyedJaggedTensor, flat: Tensor, keys: Sequence[int], wide: torch.dtype,
    *, weighted: bool,
) -> Tensor:  # fmt: skip
    """Pool unpooled rows in the unsharded order (exact mode). Returns a flat output.

    Args:
        flat: the rows of each read's ids, read after read.
        keys: per read, the position of its key in the batch.
        wide: accumulation dtype.
    """
    sizes = features.length_per_key()
    counts = [sizes[k] for k in keys]
    parts = flat.split([count * read.dim for count, read in zip(counts, reads, strict=True)])
    rows = [part.view(count, read.dim) for part, count, read in zip(parts, counts, reads, strict=True)]
    starts = key_starts(features)
    ids = torch.arange(features.values().shape[0], device=flat.device)
    key_N = torch.ops.tilerec.segment_ids(starts, ids.shape[0])
    variable = features.variable_stride_per_key()
    batches = features.stride_per_key() if variable else [features.stride()]
    no_sinks = torch.zeros(0, dtype=torch.int64, device="cpu")
    out, _ = torch.ops.tilerec.pooled_lookup(
        rows, no_sinks, ids - starts[key_N], features.offsets(), features.weights() if weighted else None,
        list(range(len(keys))), list(keys), [int(read.mean) for read in reads], batches, wide,
        ",".join(f"{read.feature}@{read.table}" for read in reads),
    )  # fmt: skip
    if variable and len(batches) == 1:  # one key: the op treated the batch as uniform
        out = torch.cat([part.reshape(-1) for part in out.split([read.dim for read in reads], dim=1)])
    return out.reshape(-1)


def split_parts(flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return consecutive views of `flat` [sum of sizes], as `flat.split(sizes)` does.

    The backward of `Tensor.split` joins the gradients in fresh memory: for 42 MB, its page faults cost more than the
    copy. This one joins them in memory that steps reuse.
    """
    if len(sizes) < 2 or not (flat.requires_grad and torch.is_grad_enabled()):
        return flat.split(list(sizes))
    parts: tuple[Tensor, ...] = _Parts.apply(flat, list(sizes))
    return parts


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return flat.split(sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        joined = reused_empty(sum([grad.numel() for grad in grads]), grads[0].dtype, grads[0].device)
        return torch.cat(grads, out=joined), None
