-- Announces a session that draws transaction ids as fences, until it ends. $1, $2: the key.
SELECT pg_advisory_lock_shared($1::int, $2::int)
