-- Sets what a session needs for holding locks. No arguments.
-- A role or a database may have timeouts that end a wait, or asynchronous commits that repeat fences. From version 17 on
-- there is another timeout, in defaults_17.sql.
SET lock_timeout = 0;
SET statement_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET synchronous_commit = on;
SET client_min_messages = error
