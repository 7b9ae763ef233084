"""A protocol gateway and bridge between MQTT, AMQP 0-9-1 and AMQP/Fast."""

__version__ = "0.1.0"
