"""The names of `tilerec.serve`, imported on first use: a server reads its package while most modules are imported."""

from __future__ import annotations

from tilerec.lazy_names import names_on_first_use

MODULES = {
    "make_app": "tilerec.serve.app",
    "Batcher": "tilerec.serve.batcher",
    "Batching": "tilerec.serve.batching",
    "Load": "tilerec.serve.load",
    "LoadReport": "tilerec.serve.load",
    "offer_load": "tilerec.serve.load",
    "FileSource": "tilerec.serve.package_source",
    "PackageSource": "tilerec.serve.package_source",
    "ServedModel": "tilerec.serve.served_model",
}
"""Module of each name that `tilerec/serve/__init__.py` lists for type checkers."""

__getattr__, __dir__ = names_on_first_use("tilerec.serve", MODULES)
