-- Locks a key in shared mode that this session holds exclusively, unless it has done so already.
-- {key}: the key, as arguments. {classid}, {objid}, {objsubid}: the same, as pg_locks shows it.
-- Uses the waiting form, because a try is refused when another session waits. It never waits: a session that holds a
-- lock is granted it before the waiters.
SELECT pg_advisory_lock_shared({key})
WHERE NOT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND mode = 'ShareLock' AND granted
      AND classid = {classid} AND objid = {objid} AND objsubid = {objsubid}
)
