-- Lists the holders and waiters of advisory locks in this database as locks.sql does, with what the table of names has about
-- them. {table}: the table.
-- A row of the table is used only if it is of the same session. If this role may not read when the session started, the row
-- may be of an earlier session with the same process id, and only its name is used, which the key confirms.
SELECT l.classid, l.objid, l.objsubid, l.pid, l.mode, l.granted,
       extract(epoch FROM clock_timestamp() - l.waitstart)::float8 AS waited,
       coalesce(a.application_name, '') AS label, n.name, n.described,
       extract(epoch FROM clock_timestamp() - n.since)::float8 AS age, n.label AS own_label,
       replace(n.owner::text, '-', '') AS owner, n.fence
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
LEFT JOIN LATERAL (
    SELECT t.*, a.backend_start IS NOT NULL AND t.granted = l.granted AS described FROM {table} t
    WHERE t.pid = l.pid AND t.classid = l.classid AND t.objid = l.objid AND t.objsubid = l.objsubid
      AND (a.backend_start IS NULL OR t.session_start = extract(epoch FROM a.backend_start)::float8)
    ORDER BY t.session_start DESC LIMIT 1
) n ON true
WHERE l.locktype = 'advisory'
  -- The locks by which sessions agree on their fences, see open_sequence.sql.
  AND NOT (l.objsubid = 2 AND l.classid = 2147483648)
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY l.granted DESC, l.waitstart NULLS LAST, l.pid
