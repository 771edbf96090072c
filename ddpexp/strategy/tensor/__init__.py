"""Tensor parallelism: several ranks hold parts of each large layer, and compute it together."""
