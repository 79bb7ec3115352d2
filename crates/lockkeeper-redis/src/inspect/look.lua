-- Reads the holders and waiters of a lock. Writes nothing. Returns {now in ms, value of the holder key, its remaining lease in
-- ms, sharers, waiters}. A sharer is {end of its lease in ms, record}, a waiter is a record. Waiters are in queue order.
--   KEYS: see common.lua
local call = redis.call
local clock = call('TIME')
local sharers = {}
local ends = call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 1, #ends, 2 do
  local record = call('HGET', KEYS[4], ends[i])
  if record then sharers[#sharers + 1] = {ends[i + 1], record} end
end
local now = string.format('%.0f', math.floor((clock[1] * 1000000 + clock[2]) / 1000))
return {now, call('GET', KEYS[1]), call('PTTL', KEYS[1]), sharers, call('ZRANGE', KEYS[3], 0, -1)}
