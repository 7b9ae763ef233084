-- Number and size (bytes) of each session's subscriptions, the size with the client identifier, so that what
-- each user has is counted and limited. Of sessions of an earlier version only the texts count until a client
-- subscribes again.
-- works with 1

ALTER TABLE session ADD COLUMN subscriptions integer NOT NULL DEFAULT 0;
ALTER TABLE session ADD COLUMN weight bigint NOT NULL DEFAULT 0;
UPDATE session SET
    subscriptions = (SELECT count(*) FROM subscription AS s
        WHERE s.domain = session.domain AND s.client = session.client),
    weight = 2 * (length(client) + (SELECT coalesce(sum(length(s.filter)), 0) FROM subscription AS s
        WHERE s.domain = session.domain AND s.client = session.client));
