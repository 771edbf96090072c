"""Text as tokens: files that are encoded once, and windows or documents of them."""
