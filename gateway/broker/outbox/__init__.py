"""Outboxes: durable queues in front of links, for routes that settle when a message is stored."""
