"""Checkpoints: `format` describes them on disk, and is free of torch; `writer` and `reader` save and load them."""
