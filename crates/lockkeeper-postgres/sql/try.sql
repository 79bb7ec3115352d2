-- Asks for a lock without waiting.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing.
-- Answers whether it was granted, alone: elsewhere the planner may evaluate it more than once.
SELECT pg_try_advisory_lock{shared}({key}) AS granted
