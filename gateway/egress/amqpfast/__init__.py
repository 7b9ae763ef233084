"""AMQP/Fast client side: the link, and a client for programs, which share their classes."""
