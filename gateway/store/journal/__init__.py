"""Journal: a columnar record of every message that crossed, for people and for analysis.

The gateway writes it with `writer.py`; all other programs read it with `reader.py`; `format.py` specifies the
bytes. The journal is only a record: messages are delivered even if it cannot be written.
"""
