-- Tries to lock a key without waiting.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing.
-- Returns whether it was granted. The call is the only expression, because the planner may evaluate it more than once in
-- a larger one.
SELECT pg_try_advisory_lock{shared}({key}) AS granted
