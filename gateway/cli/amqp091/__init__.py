"""AMQP 0-9-1's part of the command line: test actions at the broker of a link."""
