"""Sockets out: links to remote brokers, how they come back after a failure, and what waits for them."""
