"""`format("gateway_journal")`: the journal as a table and as a stream.

`options.py` says what may be asked, `planning.py` which blocks answer, `arrow.py` maps a block's buffers to
Arrow, and `source.py` is what Spark calls.
"""
