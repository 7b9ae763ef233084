"""The journal: a columnar log of every message that crossed, for people and for analysis.

`writer.py` is the gateway's side, `reader.py` everybody else's; `format.py` says how the octets lie.
"""
