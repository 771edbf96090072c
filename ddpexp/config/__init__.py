"""Configurations: composed, checked, and turned into frozen values; the only room that sees Hydra's objects."""
