-- Renews leases; creates none. Returns 1 for each that is held, else 0. Several holds share a call, each with four keys and
-- three arguments:
--   KEYS: holder, held, sharers, info (see common.lua)
--   ARGV: owner, mode (x, s, p), with the fence behind it that the hold must have if it is known from a ticket, ttl in ms
-- A key of a wrong type is no hold: hence pcall, so that one does not fail the others.
local call, try = redis.call, redis.pcall
local now
local answers = {}

-- Extends the expiry of a key. It is always a write: a server without memory allows commands that need memory only after one
-- that does not.
local function keep(key, ttl)
  call('PEXPIRE', key, string.format('%.0f', math.max(call('PTTL', key), tonumber(ttl))))
end

-- Whether a record (see common.lua) has the fence of a ticket, if there is one.
local function agrees(ticket, command, ...)
  if not ticket then return true end
  local record = try(command, ...)
  return type(record) == 'string' and string.match(record, '^%S+ (%S+)') == ticket
end

for i = 1, #KEYS / 4 do
  local holder, held, sharers, info = unpack(KEYS, i * 4 - 3, i * 4)
  local owner, mode, ttl = unpack(ARGV, i * 3 - 2, i * 3)
  local ticket
  if #mode > 1 then mode, ticket = string.sub(mode, 1, 1), string.sub(mode, 2) end
  answers[i] = 0
  if mode == 'x' then
    if try('GET', holder) == owner and agrees(ticket, 'GET', held) then
      call('PEXPIRE', holder, ttl)
      call('PEXPIRE', held, ttl)
      answers[i] = 1
    end
  elseif mode == 'p' or try('GET', holder) == '(readers)' then
    if not now then
      local clock = call('TIME')
      now = math.floor((clock[1] * 1000000 + clock[2]) / 1000)
    end
    local ends = try('ZSCORE', sharers, owner)
    if type(ends) == 'string' and tonumber(ends) > now and agrees(ticket, 'HGET', info, owner) then
      keep(sharers, ttl)
      keep(info, ttl)
      call('ZADD', sharers, string.format('%.0f', now + tonumber(ttl)), owner)
      if mode == 's' then keep(holder, ttl) end
      answers[i] = 1
    end
  end
end
return answers
