"""AMQP/Fast on a listener: what its connections, channels and handles do on the embedded broker."""
