-- How many advisory locks are held in the database that asks. No arguments.
SELECT count(*)
FROM pg_locks
WHERE locktype = 'advisory' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
