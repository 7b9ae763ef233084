"""Brokers and gateways as they are, without a journal: sources that acknowledge when Spark has committed, and
a sink that waits for confirms.
"""
