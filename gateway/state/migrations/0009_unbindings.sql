-- Keys that the queue of a session still has to be unbound from, because their subscriptions have ended. A replica of
-- an earlier version unbinds only what it remembers itself.
-- works with 1

CREATE TABLE unbinding (
    domain text {C} NOT NULL,
    client text {C} NOT NULL,
    key text {C} NOT NULL,
    PRIMARY KEY (domain, client, key)
);
