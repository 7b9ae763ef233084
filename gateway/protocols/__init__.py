"""What peers say, as pure functions of octets: one folder per protocol, with the same file names in each.

No input or output, no clock, no Trio; and no protocol knows another.
"""
