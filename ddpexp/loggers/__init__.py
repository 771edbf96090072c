"""Loggers of a run: metrics.jsonl, TensorBoard and progress."""
