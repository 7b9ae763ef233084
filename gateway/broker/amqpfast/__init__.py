"""Destinations of AMQP/Fast: virtual hosts with queues, topics and peers, and message selection."""
