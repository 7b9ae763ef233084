"""Mutation testing: deliberate faults in the rooms that hold messages, and whether a test sees them."""
