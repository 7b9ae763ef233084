"""Links to AMQP 0-9-1 servers."""
