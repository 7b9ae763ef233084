-- The client that has set or cleared a topic, and the epoch of its session then: an older message of this client
-- that a replica was late to send replaces nothing. A topic that was cleared keeps its row without a message
-- for a while, for the same purpose. Messages of an earlier version have no epoch, and any message replaces them.
-- works with 1

ALTER TABLE retained ADD COLUMN client text {C} NOT NULL DEFAULT '';
ALTER TABLE retained ADD COLUMN epoch bigint NOT NULL DEFAULT 0;
