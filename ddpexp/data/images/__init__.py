"""Folders of images of one size in `.npy` files."""
