-- Adds the rows of locks, or updates those of waiters that were granted the lock. {rows}: the columns of each, with its age
-- in seconds.
INSERT INTO {table} (pid, session_start, classid, objid, objsubid, granted, since, name, label, owner, fence)
SELECT pid, session_start, classid, objid, objsubid, granted, clock_timestamp() - age * interval '1 second', name,
       label, owner, fence
FROM (VALUES {rows})
    AS lock (pid, session_start, classid, objid, objsubid, granted, age, name, label, owner, fence)
ON CONFLICT (pid, session_start, classid, objid, objsubid)
DO UPDATE SET granted = excluded.granted, since = excluded.since, name = excluded.name, label = excluded.label,
              owner = excluded.owner, fence = excluded.fence;
