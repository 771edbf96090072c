"""The functions that `import ddpexp` offers to Python programs and notebooks; see docs/python.md."""
