-- The user and the weight (bytes) of wills, so that what each user has is counted and limited, and the replica to which
-- the client was connected. Wills of an earlier version count nothing.
-- works with 1

ALTER TABLE will ADD COLUMN login text {C} NOT NULL DEFAULT '';
ALTER TABLE will ADD COLUMN weight bigint NOT NULL DEFAULT 0;
ALTER TABLE will ADD COLUMN replica text {C} NOT NULL DEFAULT '';
