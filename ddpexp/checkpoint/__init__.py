"""Checkpoints: state to disk and back. `format` says what lies on the disk, and is free of torch.

`writer`, `reader`.
"""
