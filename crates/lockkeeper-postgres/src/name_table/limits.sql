-- Limits the statements that share a message with these, because the session holds locks, whose statements they delay.
-- {lock_timeout}, {statement_timeout}: in milliseconds. A commit must not wait for the disk or for a standby.
SET LOCAL synchronous_commit = off;
SET LOCAL lock_timeout = {lock_timeout};
SET LOCAL statement_timeout = {statement_timeout};
