-- Fails with division_by_zero unless this role trusts the table. The lock prevents that another table takes its place before
-- the end of the transaction. It conflicts only with changes to the definition of the table.
LOCK TABLE {table} IN ACCESS SHARE MODE;
SELECT 1 / count(*) FROM (
{owner}
) AS found WHERE trusted;
