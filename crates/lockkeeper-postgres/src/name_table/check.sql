-- Returns whether the table exists, whether this role trusts it and may use it, whether it may create it, the name of this
-- role, the owner of a table that it does not trust, and the kind of the relation as DROP names it.
-- $1: the quoted name of the table. $2: its schema.
SELECT to_regclass($1) IS NOT NULL AS exists,
       coalesce(found.trusted AND (SELECT bool_and(has_table_privilege(found.oid, privilege))
                 FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege), false) AS usable,
       coalesce(has_schema_privilege(to_regnamespace(quote_ident($2))::oid, 'CREATE'), false) AS creatable,
       current_user::text AS role,
       CASE WHEN NOT found.trusted THEN found.owner::text END AS distrusted,
       CASE found.relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW' WHEN 'f' THEN 'FOREIGN TABLE'
           WHEN 'S' THEN 'SEQUENCE' WHEN 'c' THEN 'TYPE' WHEN 'i' THEN 'INDEX' ELSE 'TABLE' END AS kind
FROM (SELECT) AS one LEFT JOIN (
{owner}
) AS found ON true
