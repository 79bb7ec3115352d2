-- Compares a fence with the highest of its name, and stores it if it is not lower.
-- $1: the name. $2: the fence.
-- Returns a row if the fence passed, and none if it is stale. Concurrent checks of one name see each other's committed
-- rows: the row is locked before it is compared.
INSERT INTO lockkeeper_fences AS seen (name, fence)
VALUES ($1, $2)
ON CONFLICT (name) DO UPDATE
    SET fence = EXCLUDED.fence, passed_at = EXCLUDED.passed_at
    WHERE seen.fence <= EXCLUDED.fence
RETURNING fence
