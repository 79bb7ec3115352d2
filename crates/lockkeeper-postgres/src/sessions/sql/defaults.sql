-- Overrides settings of a role or a database that are unsafe for locks. No arguments.
-- Timeouts would end a wait, asynchronous commits would let transaction ids repeat, and a read-only transaction cannot draw a
-- fence. PostgreSQL 17 and newer has another timeout, see defaults_17.sql.
SET lock_timeout = 0;
SET statement_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET synchronous_commit = on;
SET default_transaction_read_only = off;
SET client_min_messages = error
