-- Asks what makes locks wrong on this server. No arguments.
-- Answers the version, how many locks fit into the lock table and how many are in it, how many connections
-- there may be and are, and whether a commit waits for the log and the disk.
SELECT current_setting('server_version') AS version,
       current_setting('max_locks_per_transaction')::bigint
           * (current_setting('max_connections')::bigint
              + current_setting('max_prepared_transactions')::bigint) AS lock_room,
       (SELECT count(*) FROM pg_locks) AS locks,
       current_setting('max_connections')::bigint AS connection_room,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
       current_setting('fsync') AS fsync
