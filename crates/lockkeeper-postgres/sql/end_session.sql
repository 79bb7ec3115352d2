-- Ends a session that its client can no longer reach. $1: its process id. $2: when it began, as in confirm.sql.
-- Answers a row while the session is there, and none when it is gone: then what it held is free.
SELECT pg_terminate_backend(session.pid)
FROM pg_stat_get_activity($1) AS session
WHERE extract(epoch FROM session.backend_start)::float8 = $2
