"""Specifications of tables, optimizers, machines and plans: frozen records, no tensors."""
