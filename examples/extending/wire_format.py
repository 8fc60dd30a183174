"""A wire format of your own: rows and gradients travel with 4 bits per number and a scale per row.

torchrun --nproc-per-node 2 examples/extending/wire_format.py

    scale = max|row| / 7                   fp32, 4 bytes per row
    code  = round(x / scale) + 8           1 to 15; two codes per byte: a row of w numbers takes 4 + ceil(w / 2) bytes

The error of a number is at most max|row| / 14. A row with a value that is not finite decodes to NaN: a loss scaler or a
check of gradients must be able to see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, shard
from tilerec.comms import Codec, register_codec
from tilerec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from tilerec.parallel import EmbeddingBagCollectionSharder, QCommsConfig, get_qcomm_codecs_registry
from tilerec.planner import ParameterSharding, Wire, row_wise


class Int4Codec(Codec):
    """4 bits per number. A segment is (rows, width): that many rows of that many numbers, one after the other."""

    name = "int4"
    wire_dtype = torch.uint8

    def row_elements(self, width: int) -> int:
        return 4 + (width + 1) // 2

    def encode(self, flat: Tensor, segments: Sequence[tuple[int, int]]) -> Tensor:
        parts, start = [], 0
        for rows, width in segments:
            x_RW = flat[start : start + rows * width].view(rows, width)
            start += rows * width
            scale_R = x_RW.abs().amax(1) / 7 if width else x_RW.new_zeros(rows)
            code_RW = (x_RW / torch.where(scale_R == 0, 1.0, scale_R)[:, None]).round().nan_to_num(0.0) + 8
            code_RW = torch.nn.functional.pad(code_RW.to(torch.uint8), (0, width % 2))
            pairs = code_RW[:, 0::2] | code_RW[:, 1::2] << 4
            parts.append(torch.cat((scale_R.view(torch.uint8).view(rows, 4), pairs), 1).view(-1))
        return torch.cat(parts) if parts else flat.new_empty(0, dtype=torch.uint8)

    def decode(self, wire: Tensor, segments: Sequence[tuple[int, int]]) -> Tensor:
        parts, start = [], 0
        for rows, width in segments:
            size = rows * self.row_elements(width)
            row_RE = wire[start : start + size].view(rows, self.row_elements(width))
            start += size
            scale_R1 = row_RE[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
            pairs = row_RE[:, 4:]
            code_RW = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)[:, :width]
            parts.append(((code_RW.to(torch.float32) - 8) * scale_R1).view(-1))
        return torch.cat(parts) if parts else wire.new_empty(0, dtype=torch.float32)


register_codec(Int4Codec())


def collection() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name="item", num_embeddings=500, embedding_dim=15, feature_names=["seen"]),
        EmbeddingBagConfig(name="user", num_embeddings=200, embedding_dim=8, feature_names=["user"]),
    ]
    ebc = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    return ebc


def batch(seed: int, samples: int = 64) -> KeyedJaggedTensor:
    ids = torch.randint(0, 200, (2 * samples,), generator=torch.Generator().manual_seed(seed))
    return KeyedJaggedTensor(["seen", "user"], ids, lengths=torch.ones(2 * samples, dtype=torch.int64))


def main(steps: int = 20) -> tuple[float, float]:
    """Return the largest error of a row relative to its largest number, and the last loss over the first."""
    rank = dist.get_rank()
    whole, sharded, by_plan = (collection() for _ in range(3))

    # For all tables of a kind of collection, like TorchRec's qcomms ...
    qcomms = QCommsConfig(forward_precision="int4", backward_precision="bf16")
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=get_qcomm_codecs_registry(qcomms))
    shard(sharded, row_wise(), sharder=sharder)
    # ... or for one table in a plan, beside another format.
    formats = {"item": Wire("int4", "int4"), "user": Wire()}
    shard(by_plan, {name: ParameterSharding("row_wise", wire=wire) for name, wire in formats.items()})

    exact = whole(batch(rank)).to_dict()
    error = 0.0
    for module in (sharded, by_plan):
        for name, rows in module(batch(rank)).to_dict().items():
            off = (rows - exact[name]).abs().amax(1) / exact[name].abs().amax(1)
            error = max(error, off.max().item())
    losses = []
    for _ in range(steps):
        loss = (sharded(batch(rank)).values() - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
    return error, losses[-1] / losses[0]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("largest relative error {:.3f}, loss falls to {:.2f} of the first".format(*main()))
    dist.destroy_process_group()
