-- Returns whether a session waits for a lock or executes a statement. False means that it is idle or has ended.
-- $1: its process id. $2: when it started, in seconds, which distinguishes it from a later process with the same id.
-- If the role may not read the state of the session, the lock table decides.
SELECT EXISTS (
    SELECT FROM pg_stat_get_activity($1) AS session
    WHERE extract(epoch FROM session.backend_start)::float8 = $2
      AND session.wait_event_type IS DISTINCT FROM 'Client'
) OR EXISTS (
    SELECT FROM pg_stat_get_activity($1) AS session
    JOIN pg_locks AS wanted ON wanted.pid = session.pid
    WHERE session.backend_start IS NULL AND wanted.locktype = 'advisory' AND NOT wanted.granted
) AS at_work
