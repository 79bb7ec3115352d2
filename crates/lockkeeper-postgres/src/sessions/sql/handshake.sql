-- Reads the identity of a new session and of its server. No arguments.
-- Returns the process id, when the session started (NULL if the role may not read that), whether the server is a standby,
-- its version, and its timeline (NULL on a standby).
SELECT pg_backend_pid() AS pid,
       (SELECT extract(epoch FROM backend_start)::float8
        FROM pg_stat_get_activity(pg_backend_pid())) AS started,
       pg_is_in_recovery() AS standby,
       current_setting('server_version_num')::int AS version,
       CASE WHEN NOT pg_is_in_recovery()
       THEN ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint
       END AS timeline
