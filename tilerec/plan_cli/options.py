"""Options that several commands share, as types of their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Hosts = Annotated[int | None, typer.Option(help="Number of machines.", min=1)]
PerHost = Annotated[int | None, typer.Option(help="Ranks per machine.", min=1)]
Hbm = Annotated[str | None, typer.Option(help="Device memory per rank: 80GB, 79GiB, or bytes.")]
Ddr = Annotated[str | None, typer.Option(help="Host memory per rank: 80GB, 79GiB, or bytes.")]
Batch = Annotated[int | None, typer.Option(help="Samples per rank and step.", min=1)]
DType = Annotated[str | None, typer.Option(help="Data type of all tables: fp32, bf16, fp16.")]
WireFormat = Annotated[
    str | None,
    typer.Option(help="Wire format of rows and gradients: fp32, bf16, fp16, int8, fp8."),
]
WhatIfs = Annotated[
    bool,
    typer.Option("--what-ifs/--no-what-ifs", help="Also plan a few changes, and show the savings of each."),
]
Html = Annotated[Path | None, typer.Option(help="Write a report page that opens offline.")]
PlanFile = Annotated[Path, typer.Option("--plan", help="A plan that `tilerec plan` wrote.")]
