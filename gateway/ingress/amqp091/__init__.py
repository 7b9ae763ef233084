"""AMQP 0-9-1 on a listener: what its methods do on the embedded broker, and how outcomes are told."""
