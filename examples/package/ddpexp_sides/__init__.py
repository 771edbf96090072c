"""On which side of a plane a point lies."""
