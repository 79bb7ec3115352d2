-- Sets how long a session lasts in silence, and how it is labelled.
-- $1: that time in milliseconds. $2, $3: after how many seconds of silence to ask whether the client's
-- machine is there, and how often. $4: how often to look, during a wait, whether the client is, in
-- milliseconds. $5: the label.
SELECT set_config('idle_session_timeout', $1, false),
       set_config('tcp_user_timeout', $1, false),
       set_config('tcp_keepalives_idle', $2, false),
       set_config('tcp_keepalives_interval', $3, false),
       set_config('tcp_keepalives_count', '3', false),
       set_config('client_connection_check_interval', $4, false),
       set_config('application_name', $5, false)
