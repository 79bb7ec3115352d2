-- Prepares a session to draw fences, and advances the sequence if no other session is prepared.
-- $1: the sequence. $2, $3, $4: a number and two others, which together are the keys of the locks below. $5: by how much to
-- advance.
-- Returns the last fence, which is on disk when the answer arrives, and whether no session that draws transaction ids is
-- connected.
--
-- Each prepared session holds ($2, $1) in shared mode until it ends. If no session does, the server may have crashed since
-- the last one, and may have lost fences that it returned: fewer than $5, see docs/design/postgres.md. A role that may set
-- the sequence also raises it to the clock, at 65536 values per second, in case a backup was restored. ($2, $3) is locked
-- until the advance is committed and flushed, so that no session draws a fence before that. If the log is not flushed up to
-- the last fence, the message makes the commit wait for that. The session may already commit asynchronously, if it is prepared
-- again. A standby is not waited for, as in flush_sequence.sql.
SELECT no_transaction_ids,
       CASE
           WHEN NOT is_alone THEN pg_sequence_last_value($1::oid)
           WHEN has_sequence_privilege($1::oid, 'UPDATE') THEN setval($1::oid, greatest(
               floor(extract(epoch FROM clock_timestamp()) * 65536)::bigint,
               coalesce(pg_sequence_last_value($1::oid), lowest) + $5::bigint))
           ELSE (SELECT max(nextval($1::oid)) FROM generate_series(1, $5::bigint))
       END AS fence,
       set_config('synchronous_commit', 'local', true),
       CASE
           WHEN pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()
           THEN pg_logical_emit_message(true, 'lockkeeper', '')
       END,
       CASE WHEN is_alone THEN pg_advisory_unlock($2::int, $1::oid::int) END,
       CASE WHEN no_transaction_ids THEN pg_advisory_unlock($2::int, $4::int) END,
       pg_advisory_lock_shared($2::int, $1::oid::int)
FROM (
    SELECT pg_try_advisory_lock($2::int, $1::oid::int) AS is_alone,
           pg_try_advisory_lock($2::int, $4::int) AS no_transaction_ids,
           (SELECT seqmin FROM pg_sequence WHERE seqrelid = $1::oid) AS lowest
    FROM (SELECT pg_advisory_xact_lock($2::int, $3::int) OFFSET 0) AS alone
    OFFSET 0
) AS prepared
