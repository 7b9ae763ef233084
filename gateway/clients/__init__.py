"""Brokers at the end of a URL, spoken to over blocking sockets: for the command line, and for the processes
of Spark, where there is no event loop.
"""
