"""HTTP server for packages of `tilerec.export`: batches, swaps of versions, metrics, and a load generator."""

from tilerec.serve.app import make_app
from tilerec.serve.batcher import Batcher, Batching
from tilerec.serve.load import Load, LoadReport, offer_load
from tilerec.serve.package_source import FileSource, PackageSource
from tilerec.serve.served_model import ServedModel

__all__ = [
    "Batcher", "Batching", "FileSource", "Load", "LoadReport", "PackageSource", "ServedModel", "make_app", "offer_load",
]  # fmt: skip
