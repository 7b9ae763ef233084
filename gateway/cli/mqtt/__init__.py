"""MQTT's part of the command line: trials of a link's broker before anything runs."""
