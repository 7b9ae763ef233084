"""Live sources and a sink for Spark, for brokers and gateways without a journal.

A source acknowledges messages when Spark has committed them; the sink waits for confirms.
"""
