"""Recorded traffic: journal rows as messages, and the results of mappings for them.

The package serves the jobs that route recorded traffic or publish it.
"""
