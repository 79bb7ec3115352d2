-- Waits for a lock, and then draws a fence.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing.
-- Returns how long the wait took on the server, in seconds, and the transaction id. See try_xid.sql.
SELECT extract(epoch FROM clock_timestamp() - statement_timestamp())::float8 AS waited,
       pg_current_xact_id()::text::bigint AS xid,
       pg_logical_emit_message(true, 'lockkeeper', '')
FROM (SELECT pg_advisory_lock{shared}({key}) OFFSET 0) AS granted
