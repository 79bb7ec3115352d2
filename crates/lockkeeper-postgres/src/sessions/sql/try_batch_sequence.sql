-- Tries to lock several keys without waiting and, if any was granted, draws one fence for all of them.
-- $1: the keys. $2: for each, whether to lock it in shared mode. $3: the sequence.
-- Returns the granted keys and the fence, or NULLs if no key was granted. An aggregate is computed once, regardless of how
-- often it is used, so each key is tried once.
SELECT granted, CASE WHEN granted IS NOT NULL THEN nextval($3::oid) END AS fence
FROM (
    SELECT array_agg(key) FILTER (
        WHERE CASE WHEN shared THEN pg_try_advisory_lock_shared(key) ELSE pg_try_advisory_lock(key) END
    ) AS granted
    FROM unnest($1::bigint[], $2::boolean[]) AS requested (key, shared)
    OFFSET 0
) AS tried
