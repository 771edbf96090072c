"""ddpexp against what users would pick instead, in one run, as ratios."""
