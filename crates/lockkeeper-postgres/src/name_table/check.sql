-- Returns whether the table exists, whether this role may use it, whether it may create it, and the name of the role.
-- $1: the quoted name of the table. $2: its schema.
SELECT to_regclass($1) IS NOT NULL AS exists,
       coalesce(bool_and(has_table_privilege(to_regclass($1), privilege)), false) AS usable,
       coalesce(has_schema_privilege(to_regnamespace(quote_ident($2))::oid, 'CREATE'), false) AS creatable,
       current_user::text AS role
FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
