"""What runs in every worker: the composition root, the loop, and what they are made of."""
