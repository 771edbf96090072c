"""CIFAR-10: found, downloaded or drawn, and decoded once."""
