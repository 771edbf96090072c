"""The keys of the configuration: each is declared once, beside its field. Imports neither torch nor Hydra."""
