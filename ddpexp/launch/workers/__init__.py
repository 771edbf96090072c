"""The workers' processes: how they start, what they say, what they leave behind."""
