"""Durable store: one SQLite database in WAL mode, a heap for large rows, and the journal.

A writer thread gathers what the event loop hands in and commits it in groups (writer.py). The store knows
messages, logs of messages and small records, but not what queues, sessions or routes are. The package
`journal` holds the record of the messages that crossed, for analysis with Spark.
"""
