-- The table of a register of fences. When the last fence of a name passed is only there to tell which rows
-- are too old to be of use.
CREATE TABLE IF NOT EXISTS lockkeeper_fences (
    name text COLLATE "C" PRIMARY KEY,
    fence bigint NOT NULL,
    passed_at timestamptz NOT NULL DEFAULT now()
)
