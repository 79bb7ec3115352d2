-- Waits for a lock, and then draws a fence.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing. {fence}: the call that draws the
-- fence, see `Statement::text`.
-- Returns how long the wait took on the server, in seconds, and the fence. The inner query, which OFFSET keeps separate,
-- returns its row after the grant. The sequence is an argument, so the wait does not lock it.
SELECT extract(epoch FROM clock_timestamp() - statement_timestamp())::float8 AS waited, {fence} AS fence
FROM (SELECT pg_advisory_lock{shared}({key}) OFFSET 0) AS granted
