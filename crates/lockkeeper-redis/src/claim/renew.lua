-- Renews leases. Never creates one. Returns 1 for each that is held, else 0. Several holds share a call, each with three keys
-- and four arguments:
--   KEYS: holder, sharers, info (see common.lua)
--   ARGV: owner, mode (x, s, p; followed by t if the fence is that of a ticket and must be compared), fence (0 if it is not
--         known), ttl in ms
-- A key of a wrong type is no hold, hence pcall: one such key does not fail the other renewals.
local call, try = redis.call, redis.pcall
local now
local answers = {}

-- Extends the expiry of a key. Always writes, even if the expiry does not change: a server that is out of memory allows
-- commands that need memory only after a write that does not.
local function keep(key, ttl)
  call('PEXPIRE', key, string.format('%.0f', math.max(call('PTTL', key), tonumber(ttl))))
end

-- Splits a record (see common.lua) around its fence.
local function split(record)
  return string.match(record, '^(%S+ %S+ %S+ %S+ (%S+) %S+ )(%S+)( .*)$')
end

-- Returns whether a lock that was acquired without a script, and never renewed, can have this fence: it was drawn after the
-- holder key was set, and it is not ahead of the clock.
local function is_plausible(fence, lease, holder)
  local clock = call('TIME')
  local us = clock[1] * 1000000 + clock[2]
  local age = tonumber(lease) - call('PTTL', holder)
  -- Leases count in whole milliseconds.
  return tonumber(fence) <= us and tonumber(fence) >= us - (age + 2) * 1000
end

for i = 1, #KEYS / 3 do
  local holder, sharers, info = unpack(KEYS, i * 3 - 2, i * 3)
  local owner, mode, fence, ttl = unpack(ARGV, i * 4 - 3, i * 4)
  local has_ticket = #mode > 1
  mode = string.sub(mode, 1, 1)
  answers[i] = 0
  local value = mode ~= 'p' and try('GET', holder)
  if mode == 'x' then
    if type(value) == 'string' and string.sub(value, 1, #owner + 1) == owner .. ' ' then
      local before, lease, known, behind = split(value)
      if not has_ticket or known == fence or known == '0' and is_plausible(fence, lease, holder) then
        call('PEXPIRE', holder, ttl)
        -- From the first renewal on, the record has the fence.
        if known == '0' and fence ~= '0' then call('SET', holder, before .. fence .. behind, 'PX', ttl) end
        answers[i] = 1
      end
    end
  elseif mode == 'p' or value == '(readers)' then
    if not now then
      local clock = call('TIME')
      now = math.floor((clock[1] * 1000000 + clock[2]) / 1000)
    end
    local ends = try('ZSCORE', sharers, owner)
    local record = has_ticket and try('HGET', info, owner)
    local agrees = not has_ticket or type(record) == 'string' and select(3, split(record)) == fence
    if type(ends) == 'string' and tonumber(ends) > now and agrees then
      keep(sharers, ttl)
      keep(info, ttl)
      call('ZADD', sharers, string.format('%.0f', now + tonumber(ttl)), owner)
      if mode == 's' then keep(holder, ttl) end
      answers[i] = 1
    end
  end
end
return answers
