"""Outboxes: the durable queues in front of links, for the routes that settle when a message is stored."""
