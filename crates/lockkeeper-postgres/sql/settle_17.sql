-- What makes a session fit for holding locks from PostgreSQL 17 on, beside settle.sql. No arguments.
-- A wait is a transaction, and this timeout ends the session of one that lasts longer.
SET transaction_timeout = 0
