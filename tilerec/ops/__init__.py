"""Op families: schema, reference, fake kernel and autograd formula of each op. Backends register faster kernels."""
