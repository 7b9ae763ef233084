"""MQTT's part of the command line: test actions at the broker of a link."""
