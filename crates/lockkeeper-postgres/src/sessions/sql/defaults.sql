-- Overrides settings of a role or a database that are unsafe for locks. No arguments.
-- Timeouts would end a wait, and asynchronous commits would let fences repeat. PostgreSQL 17 and newer has another
-- timeout, see defaults_17.sql.
SET lock_timeout = 0;
SET statement_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET synchronous_commit = on;
SET client_min_messages = error
