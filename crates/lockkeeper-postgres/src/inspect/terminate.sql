-- Terminates sessions, and waits until each has ended. $1: their process ids. $2: the timeout in ms.
-- Returns how many have ended.
SELECT count(*) FILTER (WHERE pg_terminate_backend(pid, $2)) AS ended FROM unnest($1::int[]) AS pid
