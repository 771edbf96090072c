"""Folders of images, one folder for each class: decoded once, read as batches."""
