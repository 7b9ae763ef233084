"""The destinations of AMQP/Fast: virtual hosts with queues, topics and peers, and what selects messages."""
