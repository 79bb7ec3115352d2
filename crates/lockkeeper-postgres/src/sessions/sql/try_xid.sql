-- Tries to lock a key without waiting and, if it was granted, draws a fence.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing.
-- Returns the transaction id, or NULL if another session holds the lock. The message forces the commit to be flushed to
-- disk. Without it, transaction ids repeat after a crash of the server.
SELECT xid, CASE WHEN xid IS NOT NULL THEN pg_logical_emit_message(true, 'lockkeeper', '') END
FROM (
    SELECT CASE WHEN pg_try_advisory_lock{shared}({key})
           THEN pg_current_xact_id()::text::bigint END AS xid
    OFFSET 0
) AS tried
