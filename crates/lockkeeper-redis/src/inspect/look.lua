-- Shows who holds and who waits, and changes nothing. Returns {now in ms, holder, its remaining lease in
-- ms, its record, sharers, waiters}; of each sharer its owner, the end of its lease and its record, of each
-- waiter its owner and its record, in the order of the queue.
local call = redis.call
local clock = call('TIME')
local sharers, waiters = {}, {}
local ends = call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
for i = 1, #ends, 2 do
  local record = call('HGET', KEYS[5], ends[i])
  if record then sharers[#sharers + 1] = {ends[i], ends[i + 1], record} end
end
for _, owner in ipairs(call('ZRANGE', KEYS[4], 0, -1)) do
  local record = call('HGET', KEYS[5], owner)
  if record then waiters[#waiters + 1] = {owner, record} end
end
local now = string.format('%.0f', math.floor((clock[1] * 1000000 + clock[2]) / 1000))
return {now, call('GET', KEYS[1]), call('PTTL', KEYS[1]), call('GET', KEYS[2]), sharers, waiters}
