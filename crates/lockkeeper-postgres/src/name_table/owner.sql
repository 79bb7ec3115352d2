-- Reads the kind and the owner of a relation, {table}, and whether this role trusts it. Using it can run code of its owner
-- with the rights of this role: triggers, views, row policies, defaults. So it must be a table that belongs to this role, to
-- a role whose rights this role has, to a superuser or to the owner of the database. A superuser has the rights of all roles,
-- which is no reason to trust them.
SELECT class.oid, class.relkind, owner.rolname AS owner,
       class.relkind = 'r' AND (owner.oid = me.oid OR owner.rolsuper OR owner.oid = datdba
           OR (NOT me.rolsuper AND pg_has_role(me.oid, owner.oid, 'USAGE'))) AS trusted
FROM pg_class AS class
JOIN pg_roles AS owner ON owner.oid = class.relowner
JOIN pg_roles AS me ON me.rolname = current_user
JOIN pg_database ON datname = current_database()
WHERE class.oid = to_regclass('{table}')
