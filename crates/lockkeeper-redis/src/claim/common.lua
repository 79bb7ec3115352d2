-- What the scripts have in common. They run on the keys of one lock (or semaphore) at a time:
--   HOLDER   a string: the owner of an exclusive lock, or '(readers)'. It is the truth: what the others say
--            of holders counts only as long as it agrees. Unused by semaphores.
--   HELD     the record of the exclusive holder
--   SHARERS  a sorted set: readers or holders of permits, by the end of their lease
--   QUEUE    a sorted set: waiters, by arrival
--   INFO     a hash: the record of each sharer and waiter; of a semaphore also the tally of its holders
--   FENCE    the last fence, kept only while it is ahead of the clock
--
-- A record is text, so that redis-cli shows it:
--   since fence mode take of ttl ends secret channel label
-- `since` is in microseconds, `ttl` and `ends` in milliseconds; `ends` is when a place in the queue does; `secret` is new for every attempt and
-- proves a pushed grant; `channel` is what its process subscribes to, '-' if nothing; `fence` of a waiter is the least that it must get.
local READERS, TALLY = '(readers)', '(tally)'
-- How many ended leases and dead waiters one call removes at most, whatever the number of its commands, and how
-- many waiters one command lets in. If there are more, it sets `more`, replies that it must be called again, and other clients'
-- commands run in between.
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

-- A record as a table; `head` and `tail` are what stands before and behind `ends`, with the blanks. All are
-- texts, because making numbers of texts and texts of numbers is most of what a script costs.
local function read(record)
  if not record then return nil end
  local since, fence, head, mode, ttl, ends, tail, secret, channel = string.match(record,
    '^(%S+) (%S+)( (%S+) %S+ %S+ (%S+) )(%S+)( (%S+) (%S+) .*)$')
  return {since = since, fence = fence, head = head, mode = mode, ttl = ttl, ends = ends, tail = tail,
    secret = secret, channel = channel}
end

local function write(p)
  return p.since .. ' ' .. p.fence .. p.head .. p.ends .. p.tail
end

-- Lets a key live for at least so long, and a little longer, so that it need not be said each time.
local function keep(key, ttl)
  ttl = tonumber(ttl)
  if call('PTTL', key) < ttl then call('PEXPIRE', key, text(ttl + math.ceil(ttl / 10))) end
end

-- How many permits a record takes, and of how many.
local function permits(p)
  local take, of = string.match(p.head, '^ %S+ (%S+) (%S+)')
  return tonumber(take), tonumber(of)
end

-- The tally of a semaphore: `holders` is how many there are, `used` how many permits they have, and `limits` how
-- many of them know of how many permits. So the cost of a permit does not depend on how many are held. INFO has it as
-- text: holders, used, and pairs of a limit and its count. Forgotten at the start of each step.
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

-- Counts again: one of the keys has expired, which it does only after the last lease, or another client has
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

-- Called before anything else that is about the sharers of a semaphore.
local function read_tally()
  if tally then return tally end
  local holders, used, limits = string.match(call('HGET', INFO, TALLY) or '0 0', '^(%d+) (%d+)(.*)$')
  tally = {holders = tonumber(holders or -1), used = tonumber(used or 0), limits = {}}
  for of, count in string.gmatch(limits or '', ' (%d+) (%d+)') do
    tally.limits[tonumber(of)] = tonumber(count)
  end
  if call('ZCARD', SHARERS) ~= tally.holders then make_tally() end
end

-- Removes some sharers, with their records.
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

-- Removes the holder key of readers when the lease of the last one has ended, or it was given back.
local function end_reading()
  local last = call('ZREVRANGE', SHARERS, 0, 0, 'WITHSCORES')[2]
  if not last or tonumber(last) <= now then call('DEL', HOLDER, SHARERS) end
end

-- Removes sharers whose lease has ended, and all if the holder key does not speak of them any more.
local function clear_sharers(is_lock)
  if is_lock and call('GET', HOLDER) ~= READERS then
    local owners = call('ZRANGE', SHARERS, 0, MAX_CLEANUP - 1)
    remove_sharers(owners, true)
    -- The records of more than those are found by forget_the_dead. (No write without need: a server that is out of memory lets a
    -- script write without limit after its first one.)
    if #owners == MAX_CLEANUP then call('DEL', SHARERS) end
    return
  end
  if not is_lock then read_tally() end
  -- One at least, which shows whether there are more.
  local most = math.max(cleanup_left, 1)
  local ended = call('ZRANGEBYSCORE', SHARERS, '-inf', text(now), 'LIMIT', 0, most)
  remove_sharers(ended, is_lock)
  cleanup_left = cleanup_left - #ended
  if is_lock then end_reading() elseif #ended == most then more = true end
end

-- Whether the owner has a lease among the sharers. What is left of one that has ended is removed.
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
-- clock may have been years ahead when it was granted. (Since Redis 7.2 a lease counts from when the script began,
-- in whole milliseconds: a little earlier than our clock.)
local function remember(fence)
  if fence > us then
    local ahead = math.min(fence - us, MAX_AHEAD)
    call('SET', FENCE, text(fence), 'PX', text(math.ceil(ahead / 1000) + 2))
  end
end

-- Refuses a floor that is implausibly far ahead of the clock, unless a fence that high is known here.
local function check_floor(floor)
  if tonumber(floor) <= us + MAX_AHEAD then return end
  local held = string.match(call('GET', HELD) or '', '^%S+ (%S+)')
  if tonumber(floor) > math.max(held or 0, call('GET', FENCE) or 0, minted[HOLDER] or 0) + 1 then
    error({err = 'FENCEAHEAD ' .. floor .. ' ' .. us_text})
  end
end

-- The fence of a new grant, as text: above every exclusive one before it, if it is exclusive itself. Nil if
-- there is none.
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

-- The same for an attempt, which fails if there is none.
local function mint_or_fail(mode, floor)
  return mint(mode, floor) or error({err = 'FENCEEND ' .. (call('GET', FENCE) or '0')})
end

-- Writes a holder in, with a lease of its own ttl from now.
local function hold(owner, p)
  p.ends = '0'
  if p.mode == 'x' then
    call('SET', HOLDER, owner, 'PX', p.ttl)
    call('SET', HELD, write(p), 'PX', p.ttl)
    return
  end
  if p.mode == 's' and call('PTTL', HOLDER) < tonumber(p.ttl) then
    call('SET', HOLDER, READERS, 'PX', p.ttl)
  end
  if p.mode == 'p' then
    if call('ZADD', SHARERS, text(now + p.ttl), owner) == 1 then
      tally.holders = tally.holders + 1
    else
      add_to_tally(call('HGET', INFO, owner), -1)
    end
    local record = write(p)
    add_to_tally(record, 1)
    call('HSET', INFO, owner, record, TALLY, tally_text())
  else
    call('ZADD', SHARERS, text(now + p.ttl), owner)
    call('HSET', INFO, owner, write(p))
  end
  keep(SHARERS, p.ttl)
  keep(INFO, p.ttl)
end

-- Publishes on a channel. If the user may not publish, the receiver finds out when it polls.
local function say(channel, word)
  redis.pcall('PUBLISH', channel, word)
end

-- Whether a channel has a subscriber on this node, as far as that may be known. The reply of PUBLISH comes too late: a cluster
-- also carries the message to other nodes, whose subscribers it does not count.
local function is_heard(channel)
  local listeners = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return listeners.err or listeners[2] > 0
end

-- Removes waiters from the head of the queue for as long as they are dead: their place has ended, or their
-- process is gone (`deaf` has its channel) and their turn has come (`fits` has what they want). At most so many. Answers how many.
local function drop_dead(me, deaf, fits, most)
  local dropped, size = 0, 8
  while dropped < most do
    size = math.min(size, most - dropped)
    local owners, dead = call('ZRANGE', QUEUE, 0, size - 1), {}
    local records = owners[1] and call('HMGET', INFO, unpack(owners))
    for i, owner in ipairs(owners) do
      local p = read(records[i])
      local lives = p and tonumber(p.ends) > now
      if lives and (owner == me or not (deaf[p.channel] and fits[p.head])) then break end
      dead[i] = owner
    end
    if #dead > 0 then
      call('ZREM', QUEUE, unpack(dead))
      call('HDEL', INFO, unpack(dead))
    end
    dropped = dropped + #dead
    if #dead < size then break end
    size = size * 2
  end
  return dropped
end

-- Grants the lock to the waiters at the head of the queue that fit, one after the other, and tells them. `me` need
-- not be told.
local function move_on(me)
  local lease, is_full
  local grants_left, deaf, fits = MAX_CLEANUP, {}, {}
  while true do
    local owner = call('ZRANGE', QUEUE, 0, 0)[1]
    if not owner then return end
    local p = read(call('HGET', INFO, owner))
    local lives = p and tonumber(p.ends) > now
    if lives and (is_full or not admits(p)) then
      -- It looks again after a third of its ttl. If the lease before it is shorter, it must know.
      if lease and lease < p.ttl / 3 then say(p.channel, 'look ' .. owner) end
      return
    end
    local to_tell = lives and owner ~= me and p.channel ~= '-'
    local enters = lives and (not to_tell or is_heard(p.channel))
    if (enters and grants_left or cleanup_left) <= 0 then
      local holder = call('GET', HOLDER)
      more = more or not holder or holder == READERS
      return
    end
    if enters then
      call('ZREM', QUEUE, owner)
      call('HDEL', INFO, owner)
      local fence = mint(p.mode, p.fence)
      if fence then
        p.fence, p.since = fence, us_text
        hold(owner, p)
        if to_tell then
          say(p.channel, 'granted ' .. owner .. ' ' .. p.secret .. ' ' .. p.fence)
        end
        lease, is_full = math.min(lease or p.ttl, p.ttl), p.mode == 'x'
      elseif to_tell then
        -- It asks again, and its attempt fails.
        say(p.channel, 'look ' .. owner)
      end
      grants_left, fits = grants_left - 1, {}
    else
      -- Without a listener, that process is gone, and the next waiter's turn has come.
      if lives then deaf[p.channel], fits[p.head] = true, true end
      cleanup_left = cleanup_left - drop_dead(me, deaf, fits, cleanup_left)
    end
  end
end
