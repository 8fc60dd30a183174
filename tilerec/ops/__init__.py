"""The op families: schema, reference, fake kernel and autograd; backends register onto them."""
