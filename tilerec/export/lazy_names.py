"""The names of `tilerec.export`, imported on first use: a server reads packages without torch's modules."""

from __future__ import annotations

from tilerec.lazy_names import names_on_first_use

MODULES = {
    "cpp_flags": "tilerec.export.cpp_flags",
    "export": "tilerec.export.exporting",
    "Package": "tilerec.export.loading",
    "load": "tilerec.export.loading",
    "Manifest": "tilerec.export.manifest",
    "Parity": "tilerec.export.serving_parity",
    "parity": "tilerec.export.serving_parity",
}
"""Module of each name that `tilerec/export/__init__.py` lists for type checkers."""

__getattr__, __dir__ = names_on_first_use("tilerec.export", MODULES)
