-- Reads the settings and the load that can make locks on this server unsafe. No arguments.
-- Returns the version, the capacity and use of the lock table, the limit and number of connections, and whether commits
-- are flushed to disk.
SELECT current_setting('server_version') AS version,
       current_setting('max_locks_per_transaction')::bigint
           * (current_setting('max_connections')::bigint
              + current_setting('max_prepared_transactions')::bigint) AS lock_room,
       (SELECT count(*) FROM pg_locks) AS locks,
       current_setting('max_connections')::bigint AS connection_room,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
       current_setting('fsync') AS fsync
