"""Regrouping: concatenate chosen keys of several keyed tensors to new tensors.

Glossary
    group   the keys whose columns form one output, in that order
    run     neighbouring columns of one input that stay neighbours in an output; copied as one block
    plan    the runs of every group; depends on keys and widths alone, so it is computed once per model

A group is one `torch.cat`: on a GPU one launch for up to 64 runs, which reads and writes each number once. The gradient
of an input is one launch, too, because one split cuts out all runs of the input. If each run were sliced separately,
the backward would add up one gradient per run, each of the size of the whole input and mostly zero.
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
    """Columns [start, stop) of input number `source`."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class RegroupPlan:
    """Runs of each group.

    Inputs x (2 columns), y (3) and z (1, another tensor), groups [z, x], [x, y]
    -> runs [z, x columns 0-2], [columns 0-5 of the first tensor]
    """

    groups: tuple[tuple[Run, ...], ...]

    @staticmethod
    def make(inputs: Sequence[Columns], groups: Sequence[Sequence[str]]) -> RegroupPlan:
        """Plan the runs; raise `InputError` for a group's key that no input has, or that two inputs have."""
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
                    f"regroup: got the string {group!r} as a group; expected a list of keys. Write [{group!r}]."
                )
            runs: list[Run] = []
            for key in group:
                if key not in home:
                    have = list(home)
                    raise UnknownKeyError(
                        f"regroup: got the unknown key {key!r}; expected some of {have[:8]}{' …' * (len(have) > 8)}. "
                        "Correct groups."
                    )
                if key in twice:
                    raise InputError(
                        f"regroup: got key {key!r} in more than one input; expected it in one. Rename it in the others."
                    )
                start, stop = inputs[home[key]].span(key)
                if runs and runs[-1].source == home[key] and runs[-1].stop == start:
                    runs[-1] = Run(home[key], runs[-1].start, stop)
                else:
                    runs.append(Run(home[key], start, stop))
            planned.append(tuple(runs))
        return RegroupPlan(tuple(planned))

    def apply(self, values: Sequence[Tensor], dim: int) -> list[Tensor]:
        """Return one tensor per group, concatenated along `dim`. A group with a single run is a view of its input."""
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
        """Split each input at the edges of runs (of groups with several): first column -> (piece, end column)."""
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
