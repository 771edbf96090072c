"""Record what happens in a run: rank zero writes, the others hold an object that does nothing."""
