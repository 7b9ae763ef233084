"""What only the command line says to brokers; the rest is in `gateway.peers`."""
