"""The embedded broker: one queue implementation, a namespace per protocol over it, and the dispatcher between
them.

It is complete without a remote broker; only mapping routes join the namespaces.
"""
