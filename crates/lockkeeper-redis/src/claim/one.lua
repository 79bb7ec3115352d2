-- Precedes common.lua in a script for one lock.
local call = redis.call
local HOLDER, HELD, SHARERS, QUEUE, INFO, FENCE = unpack(KEYS)
-- The last fence that each lock is known to have had: the clock may not have gone on since.
local minted = {}
