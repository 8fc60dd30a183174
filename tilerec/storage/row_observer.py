"""`RowObserver`: is called before and after every write of a table's rows and of the slots beside them.

about_to_write(rows)  ->  before_write(rows)      the rows still have their earlier values
...                                               an update, a reset, a sync of replicas
wrote()               ->  after_write()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from tilerec.storage.table_rows import TableRows


class RowObserver(Protocol):
    """Member of `TableRows.observers`. Rows of a cached table are those of the leaf, wherever they are."""

    def before_write(self, table: TableRows, rows_N: Tensor | None) -> None:
        """Take note of rows that are about to be written.

        Args:
            rows_N: int32 or int64, row numbers of the leaf, on any device. They may repeat, and some may be outside of
                the leaf: these are not written. None: any rows, and the memory may be replaced.
        """

    def after_write(self, table: TableRows) -> None:
        """Take note that these writes have ended. Not called for writes of any rows."""
