"""Compile a training step with `fullgraph=True`, then export the trained module, save it, load it and run it.

python examples/compile_and_export.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tilerec.optim import apply_optimizer_in_backward


class ClickModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="user", num_embeddings=1_000, embedding_dim=8, feature_names=["user"]),
                EmbeddingBagConfig(name="item", num_embeddings=5_000, embedding_dim=8, feature_names=["item"]),
            ]
        )
        self.head = torch.nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.head(self.ebc(features).values()).squeeze(1)


def batch(size: int, seed: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * size,), generator=generator)
    values = torch.randint(0, 1_000, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(["user", "item"], values, lengths)


def main(backend: str = "inductor") -> float:
    torch.manual_seed(0)
    model = ClickModel()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.1})
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)

    step = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for seed, size in enumerate([64, 96, 80]):  # a new batch size does not compile again
        loss = torch.nn.functional.binary_cross_entropy_with_logits(step(batch(size, seed)), torch.ones(size))
        head.zero_grad()
        loss.backward()
        head.step()
        print(f"batch of {size}: loss {loss.item():.4f}")

    probe = batch(32, seed=9)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "click_model.pt2"
        with torch.no_grad():
            torch.export.save(torch.export.export(model.eval(), (probe,)), path)
            loaded = torch.export.load(path).module()
            difference = (loaded(probe) - model(probe)).abs().max().item()
    print(f"exported, saved, loaded: largest difference {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
