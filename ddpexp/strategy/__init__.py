"""How gradients are reduced and model state is held: one package or module for each strategy."""
