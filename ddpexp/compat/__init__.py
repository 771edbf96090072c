"""Names of other libraries that are private, or depend on their versions: `tests/test_private_names.py` holds it.

Each docstring says which name that is and in which versions it was seen (`Private:`), why no public one does (`Why:`),
and what to do in a version without it (`When it goes:`). `tests/compat/` calls each with the real library.
"""
