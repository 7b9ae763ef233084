"""What is seen from outside while the gateway runs: plain counters, every metric in one file, and logs.

The message path only adds to integers; everything else happens when somebody looks.
"""
