"""AMQP/Fast towards a server: the link, and a client for programs; both speak through the same classes."""
