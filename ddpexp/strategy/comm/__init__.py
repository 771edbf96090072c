"""How gradients travel between the workers."""
