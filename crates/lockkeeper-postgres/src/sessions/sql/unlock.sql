-- Unlocks a key.
-- {key}: the key, as arguments. {shared}: "_shared", or nothing.
-- Returns whether this session held it.
SELECT pg_advisory_unlock{shared}({key}) AS released
