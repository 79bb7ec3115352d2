-- The table of a fence register. `passed_at` only serves to find rows that are old enough to be removed.
CREATE TABLE IF NOT EXISTS lockkeeper_fences (
    name text COLLATE "C" PRIMARY KEY,
    fence bigint NOT NULL,
    passed_at timestamptz NOT NULL DEFAULT now()
)
