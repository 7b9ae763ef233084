"""MQTT's part of the command line: what a link's broker is asked before anything runs."""
