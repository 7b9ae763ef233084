"""MQTT listeners: executing client packets on the embedded broker, and sending acknowledgements."""
