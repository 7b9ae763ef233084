-- The user and the weight (bytes) of retained messages, so that what each user has is counted and limited. No
-- index has them: a message that replaces one of another size would change all indexes of its row.
-- works with 1

ALTER TABLE retained ADD COLUMN login text {C} NOT NULL DEFAULT '';
ALTER TABLE retained ADD COLUMN weight bigint NOT NULL DEFAULT 0;
