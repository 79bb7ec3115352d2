-- Returns the highest fence of a name. $1: the name.
SELECT fence FROM lockkeeper_fences WHERE name = $1
