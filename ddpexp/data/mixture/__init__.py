"""Several sources of data as one, in given shares."""
