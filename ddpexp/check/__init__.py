"""`ddpexp check`: two steps of an experiment in a temporary folder, and what they show of its recipe."""
