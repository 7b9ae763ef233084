"""AMQP 0-9-1's part of the command line: trials of a link's broker before anything runs."""
