"""Links to MQTT servers."""
