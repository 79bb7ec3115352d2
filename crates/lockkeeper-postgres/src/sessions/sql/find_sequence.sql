-- Reads the state of a sequence of fences, and of this role's privileges. Needs no privilege.
-- $1: its schema. $2: its name. $3: the highest fence, which is the MAXVALUE of every sequence of fences.
-- Returns its id (NULL if it does not exist), whether its options are right (with a MINVALUE of at least 2^40, because a
-- sequence that is reset starts there), whether this role may draw from it, whether the
-- schema exists and this role may create it there, other sequences of fences in the database, where a new sequence starts
-- (65536 values per second since 1970), and this role.
SELECT found.oid,
       found.is_durable AND found.seqincrement = 1 AND found.seqcache = 1 AND NOT found.seqcycle
           AND found.seqmin >= 1099511627776 AND found.seqmax = $3 AS is_valid,
       has_sequence_privilege(found.oid, 'USAGE') AS may_draw,
       schema.oid IS NOT NULL AS schema_exists,
       coalesce(has_schema_privilege(schema.oid, 'CREATE'), false) AS may_create,
       (SELECT min(format('%s.%s', nspname, relname))
        FROM pg_sequence JOIN pg_class ON pg_class.oid = seqrelid
                         JOIN pg_namespace ON pg_namespace.oid = relnamespace
        WHERE seqmax = $3 AND relpersistence = 'p' AND seqrelid IS DISTINCT FROM found.oid) AS other,
       floor(extract(epoch FROM clock_timestamp()) * 65536)::bigint AS start,
       current_user::text AS role
FROM (VALUES ($1, $2)) AS wanted (schema, name)
LEFT JOIN pg_namespace AS schema ON schema.nspname = wanted.schema
LEFT JOIN (
    SELECT pg_class.oid, relnamespace, relname, relpersistence = 'p' AS is_durable, pg_sequence.*
    FROM pg_class JOIN pg_sequence ON seqrelid = pg_class.oid
) AS found ON found.relnamespace = schema.oid AND found.relname = wanted.name
