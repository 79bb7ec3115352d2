-- Releases exclusive locks without waiters. Each argument of a script costs the server time, so this one has as few as
-- possible.
--   KEYS: for each release: HOLDER, QUEUE, as in common.lua
--   ARGV: 1 if claims may wait without a queue entry, else 0; for each release: the owner and a blank
-- Returns for each release 1 if the lock is free now. 0 if nothing was changed, because the owner does not hold the lock or
-- the lock has waiters: the client then sends a full release (commands_fast.lua).
local try = redis.pcall
local replies = {}
for i = 1, #ARGV - 1 do
  local holder, queue = KEYS[2 * i - 1], KEYS[2 * i]
  local value = try('GET', holder)
  if type(value) == 'string' and string.find(value, ARGV[i + 1], 1, true) == 1 and try('ZCARD', queue) == 0 then
    local deleted = try('DEL', holder)
    if ARGV[1] == '1' then try('PUBLISH', holder, 'free') end
    replies[i] = deleted
  else
    replies[i] = 0
  end
end
return replies
