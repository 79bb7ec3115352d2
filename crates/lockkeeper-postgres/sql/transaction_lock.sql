-- Takes a lock for a transaction.
-- {try_}: "try_" to ask without waiting, or nothing. {key}: the key, as arguments. {shared}: "_shared",
-- or nothing.
-- Answers, for a try, whether it was granted.
SELECT pg_{try_}advisory_xact_lock{shared}({key})
