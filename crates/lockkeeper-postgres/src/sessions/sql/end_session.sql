-- Terminates a session that its client can no longer reach. $1: its process id. $2: when it started, as in confirm_wait.sql.
-- Returns a row while the session exists, and none after it has ended and its locks are free.
SELECT pg_terminate_backend(session.pid)
FROM pg_stat_get_activity($1) AS session
WHERE extract(epoch FROM session.backend_start)::float8 = $2
