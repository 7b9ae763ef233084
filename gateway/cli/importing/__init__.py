"""Importers of other brokers' configurations, one module for each broker."""
