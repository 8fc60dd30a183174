"""The other side of `quantized.py`: FBGEMM's CPU lookups in quantized rows, in their own environment.

`quantized.py` starts this file with the peer's Python and communicates over a pipe, one JSON object a line. Rows of 64
columns have the same bytes on both sides, so the peer reads the very rows that tilerec wrote.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


def rounds(call: Callable[[], Any], count: int, inner: int) -> dict[str, list[float]]:
    """Return wall and processor times of a call in us, one of each per round of `inner` calls."""
    wall, own = [], []
    for _ in range(count):
        begin, busy = time.perf_counter(), time.process_time()
        for _ in range(inner):
            call()
        wall.append((time.perf_counter() - begin) / inner * 1e6)
        own.append((time.process_time() - busy) / inner * 1e6)
    time.sleep(0.01)  # OpenMP's threads spin a little before they sleep: not during the other side's round
    return {"wall": wall, "own": own}


def main() -> None:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

    types = {8: SparseType.INT8, 4: SparseType.INT4, 2: SparseType.INT2}
    modules: dict[int, Any] = {}
    ids = offsets = torch.empty(0)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if request["do"] == "tables":
            bits, rows = request["bits"], torch.load(request["rows"])
            module = IntNBitTableBatchedEmbeddingBagsCodegen(
                [(f"t{t}", rows.shape[0], request["dim"], types[bits], EmbeddingLocation.HOST)
                 for t in range(request["tables"])],
                device="cpu", pooling_mode=PoolingMode.SUM, output_dtype=SparseType.FP32,
            )  # fmt: skip
            module.fill_random_weights()
            for weight, _ in module.split_embedding_weights(split_scale_shifts=False):
                weight.copy_(rows)
            modules[bits] = module
        elif request["do"] == "batch":
            ids, offsets = (tensor.int() for tensor in torch.load(request["batch"]))
        elif request["do"] == "result":
            torch.save(modules[request["bits"]](ids, offsets), request["to"])
        else:
            torch.set_num_threads(request["threads"])
            module = modules[request["bits"]]
            answer = rounds(lambda: module(ids, offsets), request["rounds"], request["inner"])  # noqa: B023
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
