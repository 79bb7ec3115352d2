-- Gives a lock back.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing.
-- Answers whether this session held it.
SELECT pg_advisory_unlock{shared}({key}) AS released
