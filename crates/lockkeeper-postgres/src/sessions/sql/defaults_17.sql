-- Additional settings for PostgreSQL 17 and newer, see defaults.sql. No arguments.
-- A wait is a transaction, and this timeout ends the session of a transaction that lasts longer.
SET transaction_timeout = 0
