-- Sets the timeouts of a transaction until it ends. $1: lock_timeout. $2: statement_timeout.
SELECT set_config('lock_timeout', $1, true), set_config('statement_timeout', $2, true)
