-- Removes the rows of locks that were released. {rows}: process id, start of the session and key of each.
DELETE FROM {table} AS stale USING (VALUES {rows}) AS gone (pid, session_start, classid, objid, objsubid)
WHERE stale.pid = gone.pid AND stale.session_start = gone.session_start AND stale.classid = gone.classid
  AND stale.objid = gone.objid AND stale.objsubid = gone.objsubid;
