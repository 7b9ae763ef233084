"""Sessions, retained messages, claims and leases: in SQLite for one process, in PostgreSQL for replicas.

Messages that wait are not here: the embedded broker has them in its store, replicas in RabbitMQ queues.
"""
