-- Prepares a session to draw fences, and advances the sequence if no other session is prepared.
-- $1: the sequence. $2, $3, $4: a number and two others, which together are the keys of the locks below.
-- Returns the last fence, and whether no session that draws transaction ids is connected.
--
-- Each prepared session holds ($2, $1) in shared mode until it ends. If no session does, the server may have crashed since
-- the last one, and may have lost the last fences that it returned (docs/design/postgres.md). At most 33 per connection
-- can be lost, so the sequence advances by more. A role that may set it also raises it to the clock, at 65536 values per
-- second, in case a backup was restored. ($2, $3) is locked until the advance is committed and flushed, so that no session
-- draws a fence before that.
SELECT no_transaction_ids,
       CASE
           WHEN NOT is_alone THEN pg_sequence_last_value($1::oid)
           WHEN has_sequence_privilege($1::oid, 'UPDATE') THEN setval($1::oid, greatest(
               floor(extract(epoch FROM clock_timestamp()) * 65536)::bigint,
               coalesce(pg_sequence_last_value($1::oid), lowest) + advance))
           ELSE (SELECT max(nextval($1::oid)) FROM generate_series(1, advance))
       END AS fence,
       CASE WHEN is_alone THEN pg_advisory_unlock($2::int, $1::oid::int) END,
       CASE WHEN no_transaction_ids THEN pg_advisory_unlock($2::int, $4::int) END,
       pg_advisory_lock_shared($2::int, $1::oid::int)
FROM (
    SELECT pg_try_advisory_lock($2::int, $1::oid::int) AS is_alone,
           pg_try_advisory_lock($2::int, $4::int) AS no_transaction_ids,
           (SELECT seqmin FROM pg_sequence WHERE seqrelid = $1::oid) AS lowest,
           33 * (current_setting('max_connections')::int + 32) AS advance
    FROM (SELECT pg_advisory_xact_lock($2::int, $3::int) OFFSET 0) AS alone
    OFFSET 0
) AS prepared
