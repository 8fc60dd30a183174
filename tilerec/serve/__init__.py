"""HTTP server for packages of `tilerec.export`: batches, swaps of versions, metrics, and a load generator.

The names below are imported on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilerec.serve.app import make_app as make_app
    from tilerec.serve.batcher import Batcher as Batcher
    from tilerec.serve.batching import Batching as Batching
    from tilerec.serve.load import Load as Load
    from tilerec.serve.load import LoadReport as LoadReport
    from tilerec.serve.load import offer_load as offer_load
    from tilerec.serve.package_source import FileSource as FileSource
    from tilerec.serve.package_source import PackageSource as PackageSource
    from tilerec.serve.served_model import ServedModel as ServedModel
else:
    from tilerec.serve.lazy_names import __dir__ as __dir__
    from tilerec.serve.lazy_names import __getattr__ as __getattr__
