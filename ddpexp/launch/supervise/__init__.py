"""Watch the workers of one job: what they say, which one fails or hangs, and why."""
