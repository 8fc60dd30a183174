"""Commands of a run: `tilerec train`, `eval`, `predict` and `init`."""
