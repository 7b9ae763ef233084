"""MQTT on a listener: what clients say, and what it does on the embedded broker."""
