"""Shared engine: many gateways (replicas) that serve the same MQTT clients over one RabbitMQ cluster.

Topics are routed by a topic exchange of the cluster. Sessions, wills, retained messages, dead letters and
leases are in a database that all replicas share. Replicas never connect to each other; they communicate
through the cluster and the database only.
"""
