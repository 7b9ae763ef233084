-- The first schema. Times are seconds since 1970 of the database's clock.

CREATE TABLE lane (
    id text {C} PRIMARY KEY,
    number bigint NOT NULL,
    seen double precision NOT NULL
);

CREATE TABLE replica (
    replica text {C} PRIMARY KEY,
    name text NOT NULL,
    address text NOT NULL,
    version text NOT NULL,
    seen double precision NOT NULL,
    dead integer NOT NULL
);

-- `reap_at` is `expires_at`, or later: until then an expired session is claimed by a reaper.
CREATE TABLE session (
    domain text {C} NOT NULL,
    client text {C} NOT NULL,
    epoch bigint NOT NULL,
    owner text NOT NULL,
    connected integer NOT NULL,
    login text NOT NULL,
    place text NOT NULL,
    queue text NOT NULL,
    expiry double precision NOT NULL,
    expires_at double precision,
    reap_at double precision,
    holder text NOT NULL,
    holder_epoch bigint NOT NULL,
    given_back {bytes} NOT NULL,
    PRIMARY KEY (domain, client)
);
CREATE INDEX session_reap ON session (reap_at) WHERE reap_at IS NOT NULL;
CREATE INDEX session_owner ON session (owner) WHERE connected = 1;
CREATE INDEX session_taken ON session (holder) WHERE holder_epoch <> epoch;

-- `due_at` is null while the client is connected; of a will that somebody has claimed, when the claim ends.
CREATE TABLE will (
    domain text {C} NOT NULL,
    client text {C} NOT NULL,
    epoch bigint NOT NULL,
    message {bytes} NOT NULL,
    delay double precision NOT NULL,
    due_at double precision,
    claimed integer NOT NULL,
    PRIMARY KEY (domain, client, epoch)
);
CREATE INDEX will_due ON will (due_at) WHERE due_at IS NOT NULL;

CREATE TABLE subscription (
    domain text {C} NOT NULL,
    client text {C} NOT NULL,
    filter text {C} NOT NULL,
    options {bytes} NOT NULL,
    PRIMARY KEY (domain, client, filter)
);

CREATE TABLE packet (
    domain text {C} NOT NULL,
    client text {C} NOT NULL,
    direction integer NOT NULL,
    packet_id integer NOT NULL,
    incarnation {bytes},
    count bigint,
    released integer NOT NULL,
    PRIMARY KEY (domain, client, direction, packet_id)
);

-- `bits`: of a chunk of 64 numbers those that the client has received, as a signed integer.
CREATE TABLE received (
    domain text {C} NOT NULL,
    client text {C} NOT NULL,
    incarnation {bytes} NOT NULL,
    chunk bigint NOT NULL,
    bits bigint NOT NULL,
    PRIMARY KEY (domain, client, incarnation, chunk)
);

-- An empty `message`: a group has locked a topic that retains nothing.
CREATE TABLE retained (
    topic text {C} PRIMARY KEY,
    message {bytes} NOT NULL,
    expires_at double precision
);
CREATE INDEX retained_expiry ON retained (expires_at) WHERE expires_at IS NOT NULL;

-- Claimed by `replica`, or accepted ('') and remembered until `until`.
CREATE TABLE seen (
    route text {C} NOT NULL,
    id {bytes} NOT NULL,
    replica text {C} NOT NULL,
    until double precision NOT NULL,
    PRIMARY KEY (route, id)
);
CREATE INDEX seen_until ON seen (until) WHERE replica = '';
CREATE INDEX seen_replica ON seen (replica) WHERE replica <> '';

CREATE TABLE dead_letter (
    id text {C} PRIMARY KEY,
    route text NOT NULL,
    reason {bytes} NOT NULL,
    message {bytes} NOT NULL,
    at double precision NOT NULL,
    claimed_by text NOT NULL,
    claimed_until double precision NOT NULL
);
CREATE INDEX dead_letter_at ON dead_letter (at, id);

CREATE TABLE lease (
    name text {C} PRIMARY KEY,
    holder text NOT NULL,
    epoch bigint NOT NULL,
    until double precision NOT NULL
);

-- only postgresql
CREATE FUNCTION state_now() RETURNS double precision VOLATILE LANGUAGE sql AS
    'SELECT extract(epoch FROM clock_timestamp())::double precision';
CREATE FUNCTION state_levels(topic text) RETURNS text[] IMMUTABLE STRICT LANGUAGE sql AS
    'SELECT array_agg(n || '':'' || level) || (''#'' || count(*))
     FROM unnest(string_to_array(topic, ''/'')) WITH ORDINALITY AS one (level, n)';
-- Room in each page for rows that replace others, so that no index has to know of them.
ALTER TABLE session SET (fillfactor = 80);
ALTER TABLE retained SET (fillfactor = 80);
-- A longer list of pending entries would be read by each query.
CREATE INDEX retained_levels ON retained USING gin (state_levels(topic)) WITH (gin_pending_list_limit = 512);
