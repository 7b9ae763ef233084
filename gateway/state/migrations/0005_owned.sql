-- Sessions of a replica's clients in the order of their keys, for a comparison page by page; and whether the
-- client that has left a will was let in. Wills of an earlier version count as before.
-- works with 1

CREATE INDEX session_owned ON session (owner, domain, client) WHERE connected = 1;
ALTER TABLE will ADD COLUMN served integer NOT NULL DEFAULT 1;
