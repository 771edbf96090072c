"""How gradients are reduced and state is held: one module for each option of the group `strategy`."""
