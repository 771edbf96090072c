"""Data sets of Hugging Face's library `datasets`: converted to arrays once, read as batches."""
