"""Op families: schema, reference, fake kernel and autograd formula of each op. Backends register faster kernels.

An op is imported with its kernels.
"""

from tilerec.ops import backends as backends
