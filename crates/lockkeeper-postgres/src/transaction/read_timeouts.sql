-- Reads the timeouts of a transaction, in a form that set_timeouts.sql accepts. No arguments.
SELECT current_setting('lock_timeout'), current_setting('statement_timeout')
