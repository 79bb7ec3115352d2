-- Returns whether a session waits for a lock or executes a statement. False means that it is idle or gone.
-- $1: its process id. $2: when it started, in seconds, so that a later process with the same id is not taken for it.
-- For a role that may not see the state of the session, the lock table decides.
SELECT EXISTS (
    SELECT FROM pg_stat_get_activity($1) AS session
    WHERE extract(epoch FROM session.backend_start)::float8 = $2
      AND session.wait_event_type IS DISTINCT FROM 'Client'
) OR EXISTS (
    SELECT FROM pg_stat_get_activity($1) AS session
    JOIN pg_locks AS wanted ON wanted.pid = session.pid
    WHERE session.backend_start IS NULL AND wanted.locktype = 'advisory' AND NOT wanted.granted
) AS at_work
