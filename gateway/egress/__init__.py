"""Links to remote brokers: outgoing connections, their reconnects, and the messages that wait for them."""
