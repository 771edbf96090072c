"""The launchers: one module for each option of the group `launcher`."""
