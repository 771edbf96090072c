"""MNIST: found, downloaded or drawn, decoded once, and mapped into memory."""
