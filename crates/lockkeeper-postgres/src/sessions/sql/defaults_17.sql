-- Sets what a session needs for holding locks from PostgreSQL 17 on, beside defaults.sql. No arguments.
-- A wait is a transaction, and this timeout ends the session of a transaction that lasts longer.
SET transaction_timeout = 0
