"""Durable store: one SQLite database in WAL mode, a heap file for large rows, and the journal.

The event loop queues operations; a writer thread commits them in groups (writer.py). The store contains logs
of messages, small records and dead letters. It does not know what queues, sessions or routes are. The package
`journal` contains the record of the messages that crossed the gateway, for analysis with Spark.
"""
