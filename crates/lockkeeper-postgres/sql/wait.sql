-- Waits for a lock.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing.
-- Answers how long that took on the server, in seconds: so the client knows from when on this session
-- has been idle, without asking again.
SELECT extract(epoch FROM clock_timestamp() - statement_timestamp())::float8 AS waited
FROM (SELECT pg_advisory_lock{shared}({key}) OFFSET 0) AS granted
