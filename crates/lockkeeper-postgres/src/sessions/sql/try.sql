-- Tries to lock a key without waiting.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing.
-- Returns whether it was granted, and nothing else: the planner may evaluate the call more than once elsewhere.
SELECT pg_try_advisory_lock{shared}({key}) AS granted
