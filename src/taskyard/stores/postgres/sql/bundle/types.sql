-- Composite types that Python encodes or decodes. The number is their wire version: a type never changes while a node may
-- use it. A change makes a new type with the next number.

-- Runs that were completed, column by column; of what is the same for all, there may be one. `keyless` if none of them has
-- a key.
CREATE TYPE taskyard.completions_1 AS (
    id bigint[], token bigint[], attempt integer[], at timestamptz[], result text[], note text[], worker_pid integer[],
    device text[], keyless boolean
);

-- New tasks, column by column, and nothing where a column is empty. Of what is the same for all of them, there may be
-- one: to send each of them would take the client twice as long.
CREATE TYPE taskyard.new_tasks_1 AS (
    uuid text[], consumer text[], due_at timestamptz[], created_at timestamptz[], queue text[], args text[],
    priority smallint[], key text[], dedupe_slot text[], timeout_s double precision[], retry text[], bucket text[],
    requires text[], origin text[], extra text[]
);

-- What claims say of their tasks: what starting them does not set anew, and their tokens; column by column, and nothing
-- where a column is empty. An array of rows would be sent with a kilobyte of memory for every field of every row.
CREATE TYPE taskyard.claims_1 AS (
    token bigint[], uuid text[], consumer text[], due_at timestamptz[], created_at timestamptz[], id bigint[],
    queue text[], args text[], priority smallint[], position bigint[], key text[], dedupe_slot text[],
    timeout_s double precision[], retry text[], attempt integer[], retries integer[], crashes integer[],
    recoveries integer[], progress text[], error text[], checkpoint text[], bucket text[], requires text[],
    origin text[], extra text[]
);

-- What a node may start: at most so many in all, so many of each lane that is listed, and so many of all others together.
-- If `only_ids` is not null, only these tasks may start, each at the place in `only_devices` (null: at no place). The first
-- task that would start and is not among them ends the claim.
CREATE TYPE taskyard.demand_1 AS (
    total integer, lanes text[], rooms integer[], others integer, only_ids bigint[], only_devices text[]
);

-- What read_events_1 answers with: not the row itself, which may get more columns some day.
CREATE TYPE taskyard.event_page_1 AS (
    xid bigint, first integer, n integer, kind text, queue text, consumer text, ats timestamptz[], uuids text[],
    details text[]
);

CREATE TYPE taskyard.external_task_1 AS (
    uuid text, consumer text, due_at timestamptz, created_at timestamptz, queue text, args text, priority smallint,
    key text, dedupe_slot text, timeout_s double precision, retry text, bucket text, requires text, origin text,
    extra text, dedupe_scope text
);
