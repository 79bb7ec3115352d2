-- Reads a transaction's timeouts, in the form in which they can be set again. No arguments.
SELECT current_setting('lock_timeout'), current_setting('statement_timeout')
