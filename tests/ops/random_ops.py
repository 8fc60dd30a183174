"""The references of the random ops as functions of the ops' arguments."""

from __future__ import annotations

from tilerec.ops.random import definition as definition
from tilerec.ops.runtime.library import LIBRARY

random_fill_reference_ = LIBRARY.references["random_fill_"]
random_rows_reference_ = LIBRARY.references["random_rows_"]
