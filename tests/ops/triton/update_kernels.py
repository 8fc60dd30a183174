"""The update ops' Triton kernels as functions of the ops' arguments."""

from __future__ import annotations

from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.update.triton.backend import KERNELS

_KERNELS = LIBRARY.taking_arguments(KERNELS)
update_rows_ = _KERNELS["update_rows_"]
order_rows = _KERNELS["order_rows"]
sum_row_gradients_of_tables = _KERNELS["sum_row_gradients_of_tables"]
rule_partials_of_tables = _KERNELS["rule_partials_of_tables"]
rule_apply_to_tables_ = _KERNELS["rule_apply_to_tables_"]
