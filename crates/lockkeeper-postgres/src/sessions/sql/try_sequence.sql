-- Tries to lock a key without waiting and, if it was granted, draws a fence.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing. {fence}: the call that draws the
-- fence, see `Statement::text`.
-- Returns the fence, or NULL if another session holds the lock. CASE evaluates the fence after the grant, or not at all.
SELECT CASE WHEN pg_try_advisory_lock{shared}({key}) THEN {fence} END AS fence
