"""Destinations of AMQP/Fast over the cluster: each queue and each subscription is a queue there.

A replica has of it what its own clients may hold unacknowledged, and no more, in a queue of the embedded
broker's kind, whose storage is the cluster.
"""
