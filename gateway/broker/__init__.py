"""The embedded broker: one queue implementation, a namespace per protocol over it, and the switch between
them.

It is complete without a remote broker; only mapping routes join the namespaces.
"""
