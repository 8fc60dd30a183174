"""An embedding bag collection and each optimizer, three steps: Triton's interpreted kernels against the other backend.

Run as a script with TRITON_INTERPRET=1; prints the optimizers that agreed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.triton.interpreter import quick
from tests.ops.triton.sanitizer import sanitized_if_asked
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops import gpu_backends
from tilerec.ops.random.triton import backend as random
from tilerec.ops.update.triton import backend as update
from tilerec.optim import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec import optimizer
from tilerec.spec.table import EmbeddingBagConfig, PoolingType

OPTIMIZERS: dict[str, tuple[type, dict[str, object]]] = {
    "sgd": (optimizer.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (optimizer.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "rowwise adagrad": (optimizer.RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.1, "max_norm": 0.5}),
    "adam": (optimizer.Adam, {"lr": 0.1, "row_step": True}),
    "adamw": (optimizer.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "partial adam": (optimizer.PartialRowWiseAdam, {"lr": 0.1}),
    "lamb": (optimizer.LAMB, {"lr": 0.1}),
    "partial lamb": (optimizer.PartialRowWiseLAMB, {"lr": 0.1}),
    "lars": (optimizer.LarsSGD, {"lr": 0.1}),
    "none": (optimizer.SGD, {}),
}


def train(name: str, dtype: torch.dtype) -> list[Tensor]:
    """All that a run leaves: outputs, rows and states."""
    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(7, 4, "a", feature_names=["x", "y"], dtype=dtype),
        EmbeddingBagConfig(5, 9, "b", feature_names=["x"], pooling=PoolingType.MEAN, dtype=dtype),
    ]
    module = EmbeddingBagCollection(tables, is_weighted=True)
    cls, kwargs = OPTIMIZERS[name]
    if name != "none":
        apply_optimizer_in_backward(cls, module.parameters(), kwargs)
    left: list[Tensor] = []
    for _ in range(3):
        lengths = torch.randint(0, 4, (2 * 3,))
        count = int(lengths.sum())
        batch = KeyedJaggedTensor(["x", "y"], torch.randint(0, 5, (count,)), torch.rand(count), lengths=lengths)
        out = module(batch).values()
        out.float().square().sum().backward()
        left.append(out.detach().clone())
    left += [p.detach().clone() for p in module.parameters()]
    if name == "none":
        return [*left, *[p.grad for p in module.parameters() if p.grad is not None]]
    state = module.fused_optimizer.state_dict()["state"]
    return left + [v for own in state.values() for _, v in sorted(own.items()) if isinstance(v, Tensor)]


def main() -> None:
    expected = {(n, t): train(n, t) for n in OPTIMIZERS for t in (torch.float32, torch.bfloat16)}
    gpu_backends.register("CPU", [update.KERNELS, random.KERNELS])
    calls = []
    real = update.launch_update

    def counted(*args: object, **kwargs: object) -> None:
        calls.append(0)
        real(*args, **kwargs)  # type: ignore[arg-type]

    update.launch_update = counted
    for (name, dtype), want in expected.items():
        before = len(calls)
        got = train(name, dtype)
        assert len(calls) > before, "the kernels were not asked"
        assert len(got) == len(want) > 3
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance / 10)
        print(name, dtype)


if __name__ == "__main__":
    with quick(), sanitized_if_asked():
        main()
