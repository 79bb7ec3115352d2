-- Tries to lock several keys without waiting and, if any was granted, draws one fence for all of them.
-- $1: the keys. $2: for each, whether to lock it in shared mode.
-- Returns the granted keys and the transaction id, or NULLs if no key was granted. See try_xid.sql. An aggregate is
-- computed once, regardless of how often it is used, so each key is tried once.
SELECT granted, xid, CASE WHEN xid IS NOT NULL THEN pg_logical_emit_message(true, 'lockkeeper', '') END
FROM (
    SELECT granted, CASE WHEN granted IS NOT NULL THEN pg_current_xact_id()::text::bigint END AS xid
    FROM (
        SELECT array_agg(key) FILTER (
            WHERE CASE WHEN shared THEN pg_try_advisory_lock_shared(key) ELSE pg_try_advisory_lock(key) END
        ) AS granted
        FROM unnest($1::bigint[], $2::boolean[]) AS requested (key, shared)
    ) AS tried
    OFFSET 0
) AS drawn
