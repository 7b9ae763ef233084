"""Observation of the running gateway: plain counters, every metric in one file, and logs.

The message path only adds to integers; everything else happens when a user or Prometheus reads them.
"""
