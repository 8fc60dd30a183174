"""Train DLRM on a synthetic click stream with an explicit loop; the backward pass updates the embeddings.

    python examples/train_dlrm.py [steps]

`tilerec train synthetic` does the same with evaluation, logs and a progress bar.
"""

from __future__ import annotations

import sys

import torch

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig
from tilerec.data import PowerLawFeature, SyntheticClicks
from tilerec.metrics import auc
from tilerec.models import DLRM, DLRMTrain
from tilerec.optim import RowWiseAdagrad, apply_optimizer_in_backward


def main(steps: int = 200, batch_size: int = 1024, dim: int = 16) -> float:
    torch.manual_seed(0)
    # The clicks are drawn from a known model, so the best reachable AUC is known.
    clicks = SyntheticClicks(
        [PowerLawFeature(f"f{i}", num_rows=20_000, max_length=3) for i in range(6)], held_out_rows=1 << 13
    )

    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature.name}",
            num_embeddings=feature.num_rows,
            embedding_dim=dim,
            feature_names=[feature.name],
        )
        for feature in clicks.sparse_features
    ]
    ebc = EmbeddingBagCollection(tables=tables)
    # From here on loss.backward() updates the rows of the batch; their .grad stays None.
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})

    dense_features = len(clicks.dense_features)
    model = DLRMTrain(DLRM(ebc, dense_features, [32, dim], [64, 32, 1]))
    # The dense part is an ordinary PyTorch module: any optimizer may step the parameters without an attached one.
    attached = {id(parameter) for parameter in ebc.parameters()}
    optimizer = torch.optim.Adam((p for p in model.parameters() if id(p) not in attached), lr=2e-3)

    for step in range(steps):
        loss, _ = model(clicks.batch(start=step * batch_size, size=batch_size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}")

    with torch.no_grad():
        outputs = [model(batch)[1] for batch in clicks.held_out(batch_size)]
    predictions, labels = (torch.cat([output[k] for output in outputs]) for k in (1, 2))
    reached = auc(predictions, labels).item()
    best = clicks.best_predictions()
    assert best is not None  # synthetic clicks have a known best prediction
    print(f"held-out AUC {reached:.4f}; best reachable {auc(best, labels).item():.4f}")
    return reached


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:2]))
