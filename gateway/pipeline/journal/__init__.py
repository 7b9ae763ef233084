"""Data source `gateway_journal`: the journal as a Spark table and as a stream.

`options.py` parses options, `planner.py` selects the blocks to read, `arrow.py` maps the buffers of a block
to Arrow, and `source.py` implements Spark's interface.
"""
