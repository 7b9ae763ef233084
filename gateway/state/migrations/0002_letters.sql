-- The user and the weight (bytes) of dead letters, so that what each user has is counted and limited.
-- works with 1

ALTER TABLE dead_letter ADD COLUMN login text {C} NOT NULL DEFAULT '';
ALTER TABLE dead_letter ADD COLUMN weight bigint NOT NULL DEFAULT 0;
CREATE INDEX dead_letter_login ON dead_letter (login, at, id, weight);
CREATE INDEX dead_letter_route ON dead_letter (route, at, id);
