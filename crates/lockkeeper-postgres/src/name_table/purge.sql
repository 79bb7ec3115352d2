-- Removes rows of sessions that have ended, up to a limit. If this role may not read when a session started, its process id
-- decides.
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
    SELECT stale.ctid FROM {table} AS stale
    WHERE NOT EXISTS (
        SELECT FROM pg_stat_get_activity(NULL) AS session
        WHERE session.pid = stale.pid
          AND (session.backend_start IS NULL
               OR extract(epoch FROM session.backend_start)::float8 = stale.session_start)
    )
    LIMIT 1000
))
