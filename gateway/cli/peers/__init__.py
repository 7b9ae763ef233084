"""Brokers at the end of a URL, for `gateway publish` and `gateway subscribe`."""
