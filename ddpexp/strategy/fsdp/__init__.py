"""Sharded parameters, gradients and optimizer state, by torch's FSDP2."""
