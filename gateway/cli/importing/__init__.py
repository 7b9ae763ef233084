"""Other brokers' configurations, read line by line, and what becomes of them here."""
