"""Parts of tables and row sums for tests of rules in phases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ops.triton.update_calls import RULES, slots_for
from tilerec.ops.update.rules import make_rule

PHASED = [name for name, (rule, hyper, _) in RULES.items() if make_rule(rule, hyper).phases]


def parts_of(name: str, offsets: list[int], widths: list[int], dtype: torch.dtype) -> dict[str, Any]:
    """One part per width, each with 4 of 6 rows; the second has none where there are three."""
    _, _, kinds = RULES[name]
    counts = [4, 0, 4][: len(widths)] if len(widths) > 2 else [4] * len(widths)
    return {
        "weights": [torch.randn(6, w).to(dtype) for w in widths],
        "slots": [s for w in widths for s in slots_for(kinds, 6, w)],
        "rows": [torch.randperm(6)[:n].sort().values for n in counts],
        "grads": [torch.randn(n, w) for n, w in zip(counts, widths, strict=True)],
        "offsets": offsets,
    }


def scalars_for(parts: dict[str, Any], sums: int) -> list[Tensor]:
    """Sums so far; each part's lie apart, in one tensor of all rows."""
    counts = [r.numel() for r in parts["rows"]]
    return list((torch.rand(sums, sum(counts)) + 0.5).split(counts, dim=1))
