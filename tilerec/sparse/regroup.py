"""Regrouping: concatenate chosen keys of several keyed tensors into new tensors.

Glossary
    group   the keys whose columns make one output, in that order
    run     neighbouring columns of one input that stay neighbours in an output: copied as one block
    plan    the runs of every group; depends on keys and widths alone, so it is made once per model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.sparse.columns import Columns
from tilerec.sparse.keys import UnknownKeyError


@dataclass(frozen=True)
class Run:
    """Columns [start, stop) of input `source`."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class RegroupPlan:
    """For each group the runs it consists of.

    Inputs x (2 columns), y (3) and z (1, another tensor), groups [z, x], [x, y]
    -> runs [z, x columns 0-2], [columns 0-5 of the first tensor]
    """

    groups: tuple[tuple[Run, ...], ...]

    @staticmethod
    def make(inputs: Sequence[Columns], groups: Sequence[Sequence[str]]) -> RegroupPlan:
        """Raises `InputError` for a key that no input has, or that two inputs have and a group wants."""
        home: dict[str, int] = {}
        twice: set[str] = set()
        for source, columns in enumerate(inputs):
            for key in columns.keys:
                if home.setdefault(key, source) != source:
                    twice.add(key)
        planned = []
        for group in groups:
            if isinstance(group, str):
                raise InputError(
                    f"regroup: group {group!r} is a string; wanted a list of keys; write [{group!r}]."
                )
            runs: list[Run] = []
            for key in group:
                if key not in home:
                    have = list(home)
                    raise UnknownKeyError(
                        f"regroup: unknown key {key!r}; the inputs have {have[:8]}{' …' * (len(have) > 8)}."
                    )
                if key in twice:
                    raise InputError(
                        f"regroup: key {key!r} is in more than one input; rename it in one of them."
                    )
                start, stop = inputs[home[key]].span(key)
                if runs and runs[-1].source == home[key] and runs[-1].stop == start:
                    runs[-1] = Run(home[key], runs[-1].start, stop)
                else:
                    runs.append(Run(home[key], start, stop))
            planned.append(tuple(runs))
        return RegroupPlan(tuple(planned))

    def apply(self, values: Sequence[Tensor], dim: int) -> list[Tensor]:
        """One tensor per group, concatenated along `dim`. A group of a single run is a view of its input."""
        outputs = []
        for runs in self.groups:
            blocks = [values[run.source].narrow(dim, run.start, run.stop - run.start) for run in runs]
            if not blocks:
                outputs.append(values[0].narrow(dim, 0, 0))
            else:
                outputs.append(blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=dim))
        return outputs
