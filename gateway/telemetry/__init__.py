"""Observation of the running gateway: counters, metrics, rates, alarms, logs, the audit log and traces.

The message path only adds to integers; everything else happens when a user or Prometheus reads them.
"""
