"""Trained models as one file that any process runs: `export`, and `load` in Python; C++ programs use cpp/model.h.

The names below are imported on first use: a server needs neither torch's modules nor the exporter.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilerec.export.cpp_flags import cpp_flags as cpp_flags
    from tilerec.export.exporting import export as export
    from tilerec.export.loading import Package as Package
    from tilerec.export.loading import load as load
    from tilerec.export.manifest import Manifest as Manifest
    from tilerec.export.serving_parity import Parity as Parity
    from tilerec.export.serving_parity import parity as parity
else:
    from tilerec.export.lazy_names import __dir__ as __dir__
    from tilerec.export.lazy_names import __getattr__ as __getattr__
