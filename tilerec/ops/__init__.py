"""Op families: schema, reference, fake kernel and autograd formula of each op. Backends register faster kernels.

Whoever imports an op gets its kernels, too.
"""

from tilerec.ops import backends as backends
