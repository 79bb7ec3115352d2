-- Locks a key for a transaction.
-- {try_}: "try_" for a try without waiting, or nothing. {key}: the key, as arguments. {shared}: "_shared", or nothing.
-- A try returns whether it was granted.
SELECT pg_{try_}advisory_xact_lock{shared}({key})
