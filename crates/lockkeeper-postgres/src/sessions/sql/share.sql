-- Adds a shared lock to a key that this session holds exclusively, unless it already has one.
-- {key}: the key, as arguments. {classid}, {objid}, {objsubid}: the same, as pg_locks shows it.
-- Uses the waiting form, because a try fails while another session waits. It never waits: the server grants the lock to a
-- session that already holds it before it grants it to waiters.
SELECT pg_advisory_lock_shared({key})
WHERE NOT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND mode = 'ShareLock' AND granted
      AND classid = {classid} AND objid = {objid} AND objsubid = {objsubid}
)
