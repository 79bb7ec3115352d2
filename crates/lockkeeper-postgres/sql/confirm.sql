-- Asks whether a session still does what it was told, or has nothing to do. $1: its process id. $2: when it
-- began, in seconds, so that a later process with the same id is not taken for it.
-- Answers true while it waits for a lock or runs a statement, and false if it waits for its client or is gone. A
-- role that may not see the state of the session is told by the lock table.
SELECT EXISTS (
    SELECT FROM pg_stat_get_activity($1) AS session
    WHERE extract(epoch FROM session.backend_start)::float8 = $2
      AND session.wait_event_type IS DISTINCT FROM 'Client'
) OR EXISTS (
    SELECT FROM pg_stat_get_activity($1) AS session
    JOIN pg_locks AS wanted ON wanted.pid = session.pid
    WHERE session.backend_start IS NULL AND wanted.locktype = 'advisory' AND NOT wanted.granted
) AS at_work
