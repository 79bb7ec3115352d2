-- Lists the holders and waiters of advisory locks in this database. No arguments.
-- The waiters of one lock are in the order in which they started to wait.
SELECT l.classid, l.objid, l.objsubid, l.pid, l.mode, l.granted,
       extract(epoch FROM clock_timestamp() - l.waitstart)::float8 AS waited,
       coalesce(a.application_name, '') AS label
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory'
  -- The locks by which sessions agree on their fences, see open_sequence.sql.
  AND NOT (l.objsubid = 2 AND l.classid = 2147483648)
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY l.granted DESC, l.waitstart NULLS LAST, l.pid
