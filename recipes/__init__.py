"""The shipped recipes: one file each, with its model, data and task."""
