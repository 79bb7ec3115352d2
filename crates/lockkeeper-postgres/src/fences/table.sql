-- The table of a fence register. The time at which the last fence of a name passed only shows which rows are too old to
-- be of use.
CREATE TABLE IF NOT EXISTS lockkeeper_fences (
    name text COLLATE "C" PRIMARY KEY,
    fence bigint NOT NULL,
    passed_at timestamptz NOT NULL DEFAULT now()
)
