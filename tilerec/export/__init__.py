"""Trained models as one file that any process runs: `export`, and `load` in Python; C++ programs use cpp/model.h."""

from tilerec.export.cpp_flags import cpp_flags
from tilerec.export.exporting import export
from tilerec.export.loading import Package, load
from tilerec.export.manifest import Manifest
from tilerec.export.parity import Parity, parity

__all__ = ["Manifest", "Package", "Parity", "cpp_flags", "export", "load", "parity"]
