"""Regrouping: concatenate chosen keys of several keyed tensors into new tensors.

Glossary
    group   the keys whose columns make one output, in that order
    run     neighbouring columns of one input that stay neighbours in an output: copied as one block
    plan    the runs of every group; depends on keys and widths alone, so it is made once per model

A group is one `torch.cat`: on a GPU one launch for up to 64 runs, that reads and writes each number once. So is an
input's gradient, because its runs are cut out by one split: cut out one by one, each would bring a gradient of the
whole input, zero but for its columns, to be added to the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
        pieces = self._pieces(values, dim)
        outputs = []
        for runs in self.groups:
            if len(runs) < 2:
                run = runs[0] if runs else Run(0, 0, 0)
                outputs.append(values[run.source].narrow(dim, run.start, run.stop - run.start))
                continue
            blocks: list[Tensor] = []
            for run in runs:
                at = run.start
                while at < run.stop:
                    piece, at = pieces[run.source][at]
                    blocks.append(piece)
            outputs.append(torch.cat(blocks, dim=dim) if blocks else values[0].narrow(dim, 0, 0))
        return outputs

    def _pieces(self, values: Sequence[Tensor], dim: int) -> list[dict[int, tuple[Tensor, int]]]:
        """Each input, split where a run of a group of several begins or ends: by first column, a piece and its end."""
        cuts: list[set[int]] = [set() for _ in values]
        for runs in self.groups:
            if len(runs) > 1:
                for run in runs:
                    cuts[run.source].update((run.start, run.stop))
        pieces: list[dict[int, tuple[Tensor, int]]] = []
        for value, inner in zip(values, cuts, strict=True):
            if not inner:
                pieces.append({})
                continue
            bounds = sorted(inner | {0, value.shape[dim]})
            sizes = [end - begin for begin, end in pairwise(bounds)]
            parts = value.split(sizes, dim)
            pieces.append(dict(zip(bounds, zip(parts, bounds[1:], strict=True), strict=False)))
        return pieces
