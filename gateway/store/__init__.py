"""What survives a crash: one SQLite database in WAL mode, written by a thread of its own, and the journal."""
