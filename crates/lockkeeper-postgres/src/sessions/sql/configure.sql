-- Sets the idle timeout and the label of a session.
-- $1: the idle timeout in milliseconds. $2, $3: the idle time before a TCP keepalive probe and the interval between
-- probes, in seconds. $4: how often to check during a wait whether the client is connected, in milliseconds. $5: the
-- label.
SELECT set_config('idle_session_timeout', $1, false),
       set_config('tcp_user_timeout', $1, false),
       set_config('tcp_keepalives_idle', $2, false),
       set_config('tcp_keepalives_interval', $3, false),
       set_config('tcp_keepalives_count', '3', false),
       set_config('client_connection_check_interval', $4, false),
       set_config('application_name', $5, false)
