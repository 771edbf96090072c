"""Find values of keys by short real runs: the micro-batch that fits and the fastest one, the learning rate."""
