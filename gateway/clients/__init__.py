"""Blocking clients of a broker that is given by a URL, one for each protocol.

The command line uses them, and so do the processes of Spark, where there is no event loop.
"""
