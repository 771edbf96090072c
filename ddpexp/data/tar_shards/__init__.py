"""Samples in tar files, in WebDataset's layout."""
