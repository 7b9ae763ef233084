"""Rows of a journal as messages again, and what mappings make of them: for the jobs that route traffic or
send it.
"""
