"""The data pipeline: Spark (PySpark) over the gateway's journal, from a laptop to a cluster.

Needs the extra `pipeline` and a Java runtime, and is imported by nothing but its commands; imports no Trio.
"""
