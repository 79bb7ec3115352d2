-- Takes a lock in shared mode that this session holds exclusively, unless it has done so already.
-- {key}: the key, as arguments. {classid}, {objid}, {objsubid}: the same, as pg_locks shows it.
-- The waiting form, because the other is refused when somebody waits; it never waits, since whoever
-- holds a lock goes before those who wait for it.
SELECT pg_advisory_lock_shared({key})
WHERE NOT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND mode = 'ShareLock' AND granted
      AND classid = {classid} AND objid = {objid} AND objsubid = {objsubid}
)
