"""Journal: a columnar log of every message that crossed, for people and for analysis.

`writer.py` is the gateway's side and `reader.py` that of all other programs; `format.py` specifies the bytes.
The journal is a record: messages are delivered even if it cannot be written.
"""
