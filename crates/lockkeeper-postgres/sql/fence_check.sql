-- Compares a fence with the highest of its name, and puts it in its place if it is not lower.
-- $1: the name. $2: the fence.
-- Answers a row if it passed, and none if it is stale. Of several at once for one name, each sees what the
-- one before it has committed: the row is locked before it is compared.
INSERT INTO lockkeeper_fences AS seen (name, fence)
VALUES ($1, $2)
ON CONFLICT (name) DO UPDATE
    SET fence = EXCLUDED.fence, passed_at = EXCLUDED.passed_at
    WHERE seen.fence <= EXCLUDED.fence
RETURNING fence
