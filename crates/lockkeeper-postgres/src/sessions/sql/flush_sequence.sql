-- Flushes the last fence to disk, and all fences before it. $1: the sequence.
-- Returns the last fence. The message is logged after the values up to that fence, and the commit waits until it is on disk.
-- It does not wait for a standby, which may be down: a failover changes the timeline, which is part of a fence.
SELECT pg_sequence_last_value($1::oid) AS fence,
       set_config('synchronous_commit', 'local', true),
       pg_logical_emit_message(true, 'lockkeeper', '')
