-- Functions shared by the scripts. They run on the keys of one lock (or semaphore) at a time:
--   HOLDER   a string: the record of the exclusive holder, or '(readers)'. HOLDER is authoritative: SHARERS is
--            valid only while HOLDER is '(readers)'. Unused by semaphores.
--   SHARERS  a sorted set: the owners that share the lock, readers or holders of permits, by the end of their lease
--   QUEUE    a sorted set: the records of the waiters, by arrival
--   INFO     a hash: the record of each sharer; of a semaphore also the tally of its holders
--   FENCE    the last fence, kept only while it is ahead of the clock
--
-- A record is text, so that redis-cli shows it:
--   owner mode take of ttl since fence ends secret channel label
-- `since` is in microseconds, `ttl` and `ends` in milliseconds. `fence` of a holder is its fence, 0 if the client
-- acquired the lock without a script; of a waiter, the least fence that its grant must have. `ends` is when a waiter's entry
-- expires; 0 for a holder. `secret` is new for every attempt and proves a pushed grant; '-' for a holder. `channel` is
-- what the process of the claim subscribes to, '-' if nothing.
-- The file that precedes this one in a script defines the keys, `call`, `minted`, `is_of` and `has_subscriber`.
local READERS, TALLY = '(readers)', '(tally)'
-- How many expired leases and dead waiters one call removes at most, regardless of the number of its commands, and how
-- many waiters one command grants the lock to. If there are more, the script sets `more` and replies that it must be
-- called again, so that other clients' commands can run first.
local MAX_CLEANUP = 256
local cleanup_left = MAX_CLEANUP
local more = false
local time = call('TIME')
local us, us_text = time[1] * 1000000 + time[2], time[1] .. string.sub('00000' .. time[2], -6)
local now = math.floor(us / 1000)

-- tostring would write 1.79e+15.
local function text(number)
  return string.format('%.0f', number)
end

-- A record as a table of texts: conversions between texts and numbers are a large part of a script's cost. `front` is
-- from `mode` to `ttl`, with the blanks around it; `label` includes the blank before it.
local function read(record)
  if not record then return nil end
  local owner, front, mode, ttl, since, fence, ends, secret, channel, label = string.match(record,
    '^(%S+)( (%S+) %S+ %S+ (%S+) )(%S+) (%S+) (%S+) (%S+) (%S+)( .*)$')
  if not owner then return nil end
  return {owner = owner, front = front, mode = mode, ttl = ttl, since = since, fence = fence, ends = ends,
    secret = secret, channel = channel, label = label}
end

-- The record of a holder.
local function holder_record(p)
  return p.owner .. p.front .. p.since .. ' ' .. p.fence .. ' 0 - ' .. p.channel .. p.label
end

-- Extends the expiry of a key to at least `ttl`, and by a tenth more, so that most calls need not set it again.
local function keep(key, ttl)
  ttl = tonumber(ttl)
  if call('PTTL', key) < ttl then call('PEXPIRE', key, text(ttl + math.ceil(ttl / 10))) end
end

-- Returns how many permits a record takes, and of how many.
local function permits(p)
  local take, of = string.match(p.front, '^ %S+ (%S+) (%S+)')
  return tonumber(take), tonumber(of)
end

-- The tally of a semaphore: `holders` is the number of holders, `used` the number of permits they have, and `limits` how
-- many of them assume which limit. With it, the cost of a permit does not depend on how many are held. INFO has it as
-- text: holders, used, and pairs of a limit and its count. Reset at the start of each command.
local tally

local function add_to_tally(record, sign)
  local p = read(record)
  if not p then return end
  local take, of = permits(p)
  tally.used = tally.used + sign * take
  local count = (tally.limits[of] or 0) + sign
  tally.limits[of] = count > 0 and count or nil
end

local function tally_text()
  local words = {text(tally.holders), text(tally.used)}
  for of, count in pairs(tally.limits) do
    words[#words + 1] = text(of) .. ' ' .. text(count)
  end
  return table.concat(words, ' ')
end

-- Recounts. Needed if one of the keys has expired, which happens only after the last lease, or if another client has
-- changed them.
local function make_tally()
  tally = {holders = 0, used = 0, limits = {}}
  call('ZREMRANGEBYSCORE', SHARERS, '-inf', text(now))
  for _, owner in ipairs(call('ZRANGE', SHARERS, 0, -1)) do
    tally.holders = tally.holders + 1
    add_to_tally(call('HGET', INFO, owner), 1)
  end
  if tally.holders == 0 then
    call('HDEL', INFO, TALLY)
  else
    call('HSET', INFO, TALLY, tally_text())
    if call('PTTL', INFO) < 0 then call('PEXPIRE', INFO, text(math.max(call('PTTL', SHARERS), 1))) end
  end
end

-- Called before any other access to the sharers of a semaphore.
local function read_tally()
  if tally then return tally end
  local holders, used, limits = string.match(call('HGET', INFO, TALLY) or '0 0', '^(%d+) (%d+)(.*)$')
  tally = {holders = tonumber(holders or -1), used = tonumber(used or 0), limits = {}}
  for of, count in string.gmatch(limits or '', ' (%d+) (%d+)') do
    tally.limits[tonumber(of)] = tonumber(count)
  end
  if call('ZCARD', SHARERS) ~= tally.holders then make_tally() end
end

-- Removes sharers, with their records.
local function remove_sharers(owners, is_lock)
  if #owners == 0 then return end
  if not is_lock then
    for _, record in ipairs(call('HMGET', INFO, unpack(owners))) do add_to_tally(record, -1) end
  end
  local removed = call('ZREM', SHARERS, unpack(owners))
  call('HDEL', INFO, unpack(owners))
  if is_lock then return end
  tally.holders = tally.holders - removed
  if tally.holders > 0 then call('HSET', INFO, TALLY, tally_text()) else call('HDEL', INFO, TALLY) end
end

-- Removes the holder key of readers when the last lease has expired or was released.
local function remove_readers_key()
  local last = call('ZREVRANGE', SHARERS, 0, 0, 'WITHSCORES')[2]
  if not last or tonumber(last) <= now then call('DEL', HOLDER, SHARERS, INFO) end
end

-- Removes sharers whose lease has expired, and all of them if the holder key is not that of readers.
local function clear_sharers(is_lock)
  if is_lock and call('GET', HOLDER) ~= READERS then
    -- Write only if necessary: after a first write that needs no memory, a script may write without limit on a server that
    -- is out of memory (redis.io, "Scripting with Lua", "Execution under low memory conditions").
    if call('EXISTS', SHARERS, INFO) > 0 then call('UNLINK', SHARERS, INFO) end
    return
  end
  if not is_lock then read_tally() end
  -- At least one, which shows whether there are more.
  local most = math.max(cleanup_left, 1)
  local ended = call('ZRANGEBYSCORE', SHARERS, '-inf', text(now), 'LIMIT', 0, most)
  remove_sharers(ended, is_lock)
  cleanup_left = cleanup_left - #ended
  if is_lock then remove_readers_key() elseif #ended == most then more = true end
end

-- Returns whether the owner has a lease among the sharers. Removes an expired one.
local function shares(owner, is_lock)
  local ends = call('ZSCORE', SHARERS, owner)
  if not ends then return false end
  if tonumber(ends) > now then return true end
  remove_sharers({owner}, is_lock)
  return false
end

local function admits(p)
  if p.mode == 'p' then
    local take, limit = permits(p)
    for of in pairs(tally.limits) do limit = math.min(limit, of) end
    return tally.used + take <= limit
  end
  local holder = call('GET', HOLDER)
  return not holder or (p.mode == 's' and holder == READERS)
end

-- How far a floor may be ahead of the clock, and how long a fence that is ahead is kept at most: an hour, in
-- microseconds. This is Fence::MAX_AHEAD.
local MAX_AHEAD = 3600000000
-- Lua's numbers are exact below 2^53.
local END_OF_FENCES = 9007199254740992

-- Keeps a fence that is ahead of the clock until the clock has passed it, but for no longer than an hour: the
-- clock may have been years ahead when the fence was granted. (Since Redis 7.2 a lease counts from the start of the script,
-- in whole milliseconds, which is a little earlier than `us`.)
local function remember(fence)
  if fence > us then
    local ahead = math.min(fence - us, MAX_AHEAD)
    call('SET', FENCE, text(fence), 'PX', text(math.ceil(ahead / 1000) + 2))
  end
end

-- Bounds the fence that a quorum set for the hold with this record: at most half of its ttl, and at most an hour, ahead of
-- the clock. A node that confirms a fence is behind it by a quarter of the ttl at most; a ticket may be forged, and the
-- clock of another node may be wrong by years.
local function plausible(fence, p)
  return math.min(fence, us + math.min((p and p.ttl or 0) * 500, MAX_AHEAD))
end

-- Refuses a floor that is implausibly far ahead of the clock, unless a fence that high is known here.
local function check_floor(floor)
  if tonumber(floor) <= us + MAX_AHEAD then return end
  local held = read(call('GET', HOLDER))
  if tonumber(floor) > math.max(held and held.fence or 0, call('GET', FENCE) or 0, minted[HOLDER] or 0) + 1 then
    error({err = 'FENCEAHEAD ' .. floor .. ' ' .. us_text})
  end
end

-- Returns the fence of a new grant, as text: above that of every earlier exclusive grant, if it is exclusive itself. Nil if
-- fences are exhausted.
local function mint(mode, floor)
  local last = math.max(call('GET', FENCE) or 0, minted[HOLDER] or 0)
  if mode == 'x' then last = last + 1 end
  local fence = math.max(us, floor, last)
  if fence >= END_OF_FENCES then return nil end
  minted[HOLDER] = fence
  if fence == us then return us_text end
  remember(fence)
  return text(fence)
end

-- The same for an attempt, which fails if fences are exhausted.
local function mint_or_fail(mode, floor)
  return mint(mode, floor) or error({err = 'FENCEEND ' .. (call('GET', FENCE) or '0')})
end

-- Records a holder, with a lease of its own ttl from now.
local function hold(p)
  local record = holder_record(p)
  if p.mode == 'x' then
    call('SET', HOLDER, record, 'PX', p.ttl)
    return
  end
  if p.mode == 's' and call('PTTL', HOLDER) < tonumber(p.ttl) then
    call('SET', HOLDER, READERS, 'PX', p.ttl)
  end
  local is_new = call('ZADD', SHARERS, text(now + p.ttl), p.owner) == 1
  if p.mode == 'p' then
    if is_new then tally.holders = tally.holders + 1 else add_to_tally(call('HGET', INFO, p.owner), -1) end
    add_to_tally(record, 1)
    call('HSET', INFO, p.owner, record, TALLY, tally_text())
  else
    call('HSET', INFO, p.owner, record)
  end
  keep(SHARERS, p.ttl)
  keep(INFO, p.ttl)
end

-- Publishes on a channel. If the user lacks PUBLISH, the receiver polls.
local function publish(channel, message)
  redis.pcall('PUBLISH', channel, message)
end

-- Removes dead waiters from the head of the queue, at most `most`, and returns how many. A waiter is dead if its entry has
-- expired, or if its process is gone (its channel is in `without_subscriber`) and it is next (its front is in `fits`).
local function remove_dead_waiters(me, without_subscriber, fits, most)
  local removed, size = 0, 8
  while removed < most do
    size = math.min(size, most - removed)
    local records, dead = call('ZRANGE', QUEUE, 0, size - 1), {}
    for i, record in ipairs(records) do
      local p = read(record)
      local unexpired = p and tonumber(p.ends) > now
      if unexpired and (p.owner == me or not (without_subscriber[p.channel] and fits[p.front])) then break end
      dead[i] = record
    end
    if #dead > 0 then call('ZREM', QUEUE, unpack(dead)) end
    removed = removed + #dead
    if #dead < size then break end
    size = size * 2
  end
  return removed
end

-- Grants the lock to the waiters at the head of the queue that it admits, one after the other, and notifies them, except
-- `me`, whose own command this is.
local function hand_off(me)
  local lease, is_full
  local grants_left, without_subscriber, fits = MAX_CLEANUP, {}, {}
  while true do
    local record = call('ZRANGE', QUEUE, 0, 0)[1]
    if not record then return end
    local p = read(record)
    local unexpired = p and tonumber(p.ends) > now
    if unexpired and (is_full or not admits(p)) then
      -- It retries after a third of its ttl. If the lease ahead of it ends before that, the waiter is notified, so that it
      -- learns the time.
      if lease and lease < p.ttl / 3 then publish(p.channel, 'look ' .. p.owner) end
      return
    end
    local must_notify = unexpired and p.owner ~= me and p.channel ~= '-'
    local is_alive = unexpired and (not must_notify or has_subscriber(p.channel))
    if (is_alive and grants_left or cleanup_left) <= 0 then
      local holder = call('GET', HOLDER)
      more = more or not holder or holder == READERS
      return
    end
    if is_alive then
      call('ZREM', QUEUE, record)
      local fence = mint(p.mode, p.fence)
      if fence then
        p.fence, p.since = fence, us_text
        hold(p)
        if must_notify then
          publish(p.channel, 'granted ' .. p.owner .. ' ' .. p.secret .. ' ' .. fence)
        end
        lease, is_full = math.min(lease or p.ttl, p.ttl), p.mode == 'x'
      elseif must_notify then
        -- Its next attempt fails with the reason.
        publish(p.channel, 'look ' .. p.owner)
      end
      grants_left, fits = grants_left - 1, {}
    else
      -- Without a subscriber, the process is gone, and the next waiter is the head.
      if unexpired then without_subscriber[p.channel], fits[p.front] = true, true end
      cleanup_left = cleanup_left - remove_dead_waiters(me, without_subscriber, fits, cleanup_left)
    end
  end
end
