"""Shared state of sessions, retained messages, dead letters, identifiers and leases.

The state is in a SQLite file for one process, or in a PostgreSQL database for replicas. Messages that wait
for delivery are not part of it: the embedded broker has them in its store, replicas in RabbitMQ queues.
"""
