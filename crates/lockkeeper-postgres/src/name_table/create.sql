-- The table of the names of locks that have been held or waited for longer than some tens of milliseconds. {table}: its name.
-- A row describes a lock of pg_locks: the same process, key and state, and the same session. Any other row is stale.
-- UNLOGGED: after a crash of the server no session is left that a row could describe. Names may contain any character,
-- also NUL, so they are bytes in UTF-8.
CREATE UNLOGGED TABLE IF NOT EXISTS {table} (
    pid int, session_start float8, classid oid, objid oid, objsubid smallint,
    granted boolean NOT NULL, since timestamptz NOT NULL,
    name bytea NOT NULL, label bytea NOT NULL, owner uuid NOT NULL, fence bigint,
    PRIMARY KEY (pid, session_start, classid, objid, objsubid)
)
