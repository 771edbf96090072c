"""How gradients are reduced between the workers: through shared memory or the backend."""
