-- The operation that has opened a session last, as its replica names it, so that a replica without a reply to it
-- cancels only what this operation has done. A replica of an earlier version leaves the name as it is, but changes
-- the owner.
-- works with 1

ALTER TABLE session ADD COLUMN opening text {C} NOT NULL DEFAULT '';
