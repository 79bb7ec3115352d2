-- Waits for a lock.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing.
-- Returns how long the wait took on the server, in seconds. The client derives from it since when the session is idle.
SELECT extract(epoch FROM clock_timestamp() - statement_timestamp())::float8 AS waited
FROM (SELECT pg_advisory_lock{shared}({key}) OFFSET 0) AS granted
