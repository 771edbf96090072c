"""The loggers of a run: metrics.jsonl, progress, TensorBoard, and the interface of those that packages bring."""
