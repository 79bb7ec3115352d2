-- Precedes common.lua in a script for one lock.
local call = redis.call
local HOLDER, SHARERS, QUEUE, INFO, FENCE = unpack(KEYS)
-- The last known fence of the lock. The clock may not have advanced since.
local minted = {}
-- Returns whether the value of the holder key is the record of this owner.
local function is_of(value, owner)
  return type(value) == 'string' and string.sub(value, 1, #owner + 1) == owner .. ' '
end
-- Returns whether a channel has a subscriber on this node. Also true if the user lacks the permission to check.
local function has_subscriber(channel)
  local listeners = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return listeners.err or listeners[2] > 0
end
