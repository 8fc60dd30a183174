"""The `tilerec` operator namespace.

Each op file (`ops/lookup.py`, `ops/update.py`, …) defines its ops here, with a plain-PyTorch reference, a fake
kernel and an autograd formula. Backends register faster kernels onto the same names.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("tilerec", "DEF")
