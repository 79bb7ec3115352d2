-- Returns how many advisory locks are held in the current database. No arguments.
SELECT count(*)
FROM pg_locks
WHERE locktype = 'advisory' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
