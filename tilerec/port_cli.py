"""`tilerec port`: rewrite a program's imports of TorchRec to tilerec's.

tilerec port train.py --out ported.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tilerec.atomic_file import write_file
from tilerec.errors import InputError, TilerecError
from tilerec.output_path import check_output_file
from tilerec.terminal import print_error


def port(
    program: Annotated[Path, typer.Argument(help="A Python program that imports torchrec.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: standard output.")] = None,
) -> None:
    """Rewrite a program's imports of TorchRec to tilerec's, and list what a person must look at on stderr."""
    from tilerec.compat import port as porting

    try:
        if out is not None:
            check_output_file("--out", out, None, {"PROGRAM": [program]})
        try:
            source = program.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{program}: got {error}; expected a Python program. Check the path.") from error
        ported = porting.port(source, str(program))
        if out is None:
            sys.stdout.write(ported.text)
        else:
            write_file(out, ported.text, "program")
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    for line, note in ported.notes:
        typer.echo(f"{program}:{line}: {note}", err=True)
