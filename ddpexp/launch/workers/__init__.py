"""Worker processes: the fork server that starts them, their control channel, their logs, the cleanup after them."""
