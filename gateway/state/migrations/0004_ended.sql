-- Filters of shared subscriptions, whose queues have to stay while sessions have them.
-- works with 1

CREATE INDEX subscription_shared ON subscription (filter) WHERE substr(filter, 1, 7) = '$share/';

-- Queues of sessions that have ended, until they are deleted; `reap_at`: when somebody else may do that.
CREATE TABLE ended_queue (
    queue text {C} PRIMARY KEY,
    reap_at double precision NOT NULL
);
CREATE INDEX ended_queue_reap ON ended_queue (reap_at);
