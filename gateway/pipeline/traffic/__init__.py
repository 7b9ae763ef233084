"""Recorded traffic: journal rows as messages, and the results of mappings for them.

The jobs that route recorded traffic or publish it use this package.
"""
