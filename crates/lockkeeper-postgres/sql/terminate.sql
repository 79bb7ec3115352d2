-- Ends sessions, and waits until each is gone. $1: their process ids. $2: for how long to wait, in ms.
-- Answers how many ended.
SELECT count(*) FILTER (WHERE pg_terminate_backend(pid, $2)) AS ended FROM unnest($1::int[]) AS pid
