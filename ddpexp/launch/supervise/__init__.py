"""Watch the workers of one job: what they report, which one fails or hangs, and why."""
