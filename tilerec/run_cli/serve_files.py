"""`tilerec serve-files`: files with which other servers serve a package.

tilerec serve-files model.pt2 --triton models
tilerec serve-files model.pt2 --kserve service.yaml --image IMAGE --storage-uri s3://BUCKET/FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilerec.errors import ConfigError, TilerecError
from tilerec.file_kind import KSERVE
from tilerec.output_path import check_output_file
from tilerec.terminal import print_error, print_plain


def serve_files(
    package: Annotated[Path, typer.Argument(help="A package of `tilerec export`.")],
    triton: Annotated[
        Path | None, typer.Option(help="Model repository of Triton Inference Server: adds a version of the model.")
    ] = None,
    kserve: Annotated[Path | None, typer.Option(help="File to write: an InferenceService of KServe.")] = None,
    name: Annotated[str, typer.Option(help="Of the model or service. Default: that of the file.")] = "",
    workers: Annotated[int, typer.Option(help="Processes: instances of Triton, or workers of tilerec serve.")] = 1,
    threads: Annotated[int, typer.Option(help="Threads of each instance of Triton.")] = 1,
    image: Annotated[str, typer.Option(help="With --kserve: container image with tilerec[serve].")] = "",
    storage_uri: Annotated[str, typer.Option(help="With --kserve: s3://, pvc://, … of the package's folder.")] = "",
    replicas: Annotated[int, typer.Option(help="With --kserve: least number of pods.")] = 1,
) -> None:
    """Write a package into a model repository of Triton Inference Server, or a manifest for KServe."""
    from tilerec.atomic_file import write_file
    from tilerec.export.kserve_manifest import KserveOptions, kserve_manifest
    from tilerec.export.triton_repository import write_triton

    try:
        if triton is None and kserve is None:
            raise ConfigError("--triton, --kserve: got neither; expected one or both. Try --triton models.")
        if kserve is not None:
            check_output_file("--kserve", kserve, KSERVE, {"PACKAGE": [package]})
        if triton is not None:
            version = write_triton(package, triton, name, instances=workers, threads=threads)
            print_plain(f"wrote {version}; start: tritonserver --model-repository={triton}")
        if kserve is not None:
            text = kserve_manifest(package, KserveOptions(image, storage_uri, name, workers, replicas))
            write_file(kserve, text, "KServe manifest")
            print_plain(f"wrote {kserve}; start: kubectl apply -f {kserve}")
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
