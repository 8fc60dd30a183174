"""Run in a process of its own with TRITON_INTERPRET=1: interpreted kernels serve the lookups of CPU tensors.

Whole modules and torch's own checks of operators then run as they would on a GPU. Prints "ok" at the end.
"""

from __future__ import annotations

import torch
from torch.library import opcheck

from tests.ops.triton.interpreter import quick
from tests.ops.triton.sanitizer import sanitized_if_asked
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops import gpu_backends
from tilerec.ops.lookup.triton import backend as lookup
from tilerec.ops.runtime.triton.reports import new_report
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType

OPS = torch.ops.tilerec
NO_SINKS = torch.zeros(0, dtype=torch.int64)


def features() -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 0, 1, 3, 1, 0])
    return KeyedJaggedTensor(
        ["y", "z", "x"], torch.randint(0, 7, (7,)), torch.randn(7).requires_grad_(), lengths=lengths
    )


def trained() -> list[torch.Tensor]:
    """Outputs and gradients of a pooled, a weighted and a sequence collection."""
    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(7, 4, "a", feature_names=["x", "y"]),
        EmbeddingBagConfig(9, 12, "b", feature_names=["y"], pooling=PoolingType.MEAN),
    ]
    plain, weighted = EmbeddingBagCollection(tables), EmbeddingBagCollection(tables, is_weighted=True)
    rows = EmbeddingCollection([EmbeddingConfig(7, 4, "a", feature_names=["x", "y"])])
    batch = features()
    outputs = [plain(batch).values(), weighted(batch).values(), *[jt.values() for jt in rows(batch).values()]]
    torch.cat([(out * torch.linspace(1, 2, out.numel()).view_as(out)).reshape(-1) for out in outputs]).sum().backward()
    leaves = [*plain.parameters(), *weighted.parameters(), *rows.parameters(), batch.weights()]
    return [*outputs, *[leaf.grad for leaf in leaves if leaf.grad is not None]]


def main() -> None:
    wanted = trained()
    assert len(wanted) == 4 + 6
    gpu_backends.register("CPU", [lookup.KERNELS])
    lookup._STEPS = 2  # for 8: the interpreter takes four times as long for those
    launches = []
    lookup.new_report = lambda device: launches.append(device) or new_report(device)  # type: ignore[func-returns-value]
    got = trained()
    assert len(launches) == 4, "two pooled lookups, a sequence lookup, the gradient of sample weights"
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)

    weights = [torch.randn(5, 4, requires_grad=True), torch.randn(6, 3, requires_grad=True)]
    ids, offsets = torch.tensor([1, 2, 3, 4, 0, 1]), torch.tensor([0, 2, 3, 4, 6])
    per_id = torch.randn(6, requires_grad=True)
    for batches in ([2], [2, 2]):
        layout = ([0, 1], [0, 1], [0, 1], batches)
        for sample_weights in (None, per_id):
            opcheck(
                OPS.pooled_lookup.default,
                (weights, NO_SINKS, ids, offsets, sample_weights, *layout, torch.float32, "f@t,g@u"),
                test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
            )
        grad = torch.randn(2, 7) if batches == [2] else torch.randn(14)
        plain = [weight.detach() for weight in weights]
        opcheck(OPS.sample_weight_grad.default, (plain, ids, offsets, grad, *layout))
    opcheck(
        OPS.sequence_lookup.default,
        ([weights[0], weights[0]], NO_SINKS, ids, torch.tensor([0, 2, 6]), [0, 1], torch.float32, "f@t,g@u"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


if __name__ == "__main__":
    with quick(), sanitized_if_asked():
        main()
    print("ok")
