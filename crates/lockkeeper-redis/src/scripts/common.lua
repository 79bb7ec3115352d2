-- What the scripts have in common. They run on the keys of one lock (or semaphore) at a time:
--   HOLDER   a string: the owner of an exclusive lock, or '(readers)'. It is the truth: what the others say
--            of holders counts only as long as it agrees. Unused by semaphores.
--   HELD     the record of the exclusive holder
--   SHARERS  a sorted set: readers or holders of permits, by the end of their lease
--   QUEUE    a sorted set: waiters, by arrival
--   INFO     a hash: the record of each sharer and waiter
--   FENCE    the last fence, kept only while it is ahead of the clock
--
-- A record is text, so that redis-cli shows it:
--   since fence mode take of ttl ends secret channel label
-- `since` is in microseconds, `ttl` and `ends` in milliseconds; `ends` is when a place in the queue does; `secret` is new for every ask and
-- proves a pushed grant; `channel` is where its
-- process listens, '-' if nowhere; `fence` of a waiter is the least that it must get.
local READERS = '(readers)'
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

-- Removes sharers whose lease has ended, and all if the holder key does not speak of them any more.
local function clear_sharers(is_lock)
  local last = text(now)
  if is_lock and call('GET', HOLDER) ~= READERS then last = '+inf' end
  for _, owner in ipairs(call('ZRANGEBYSCORE', SHARERS, '-inf', last)) do
    call('ZREM', SHARERS, owner)
    call('HDEL', INFO, owner)
  end
  if is_lock and last ~= '+inf' and call('EXISTS', SHARERS) == 0 then call('DEL', HOLDER) end
end

-- How many permits a record takes, and of how many.
local function permits(p)
  local take, of = string.match(p.head, '^ %S+ (%S+) (%S+)')
  return tonumber(take), tonumber(of)
end

local function admits(p)
  if p.mode == 'p' then
    local used, limit = permits(p)
    for _, owner in ipairs(call('ZRANGE', SHARERS, 0, -1)) do
      local other = read(call('HGET', INFO, owner))
      if other then
        local take, of = permits(other)
        used, limit = used + take, math.min(limit, of)
      end
    end
    return used <= limit
  end
  local holder = call('GET', HOLDER)
  return not holder or (p.mode == 's' and holder == READERS)
end

-- Keeps a fence that is ahead of the clock until the clock has passed it. (Since Redis 7.2 a lease counts from
-- when the script began, in whole milliseconds: a little earlier than our clock.)
local function remember(fence)
  if fence > us then
    call('SET', FENCE, text(fence), 'PX', text(math.ceil((fence - us) / 1000) + 2))
  end
end

-- The fence of a new grant, as text: above every exclusive one before it, if it is exclusive itself.
local function mint(mode, floor)
  local last = math.max(call('GET', FENCE) or 0, minted[HOLDER] or 0)
  if mode == 'x' then last = last + 1 end
  local fence = math.max(us, floor, last)
  minted[HOLDER] = fence
  if fence == us then return us_text end
  remember(fence)
  return text(fence)
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
  call('ZADD', SHARERS, text(now + p.ttl), owner)
  call('HSET', INFO, owner, write(p))
  keep(SHARERS, p.ttl)
  keep(INFO, p.ttl)
end

-- Says something on a channel. A user that may not publish does not: whoever is meant finds out when it
-- looks again.
local function say(channel, word)
  redis.pcall('PUBLISH', channel, word)
end

-- Whether anybody listens on a channel on this very node, as far as that may be known. What PUBLISH
-- answers comes too late: a cluster also carries the word to other nodes, whose listeners it does not count.
local function is_heard(channel)
  local listeners = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return listeners.err or listeners[2] > 0
end

-- Lets in whoever is at the head of the queue and fits, one after the other, and tells them. `me` need
-- not be told.
local function move_on(me)
  local lease, is_full
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
    call('ZREM', QUEUE, owner)
    call('HDEL', INFO, owner)
    if lives then
      p.fence = mint(p.mode, p.fence)
      p.since = us_text
      local to_tell = owner ~= me and p.channel ~= '-'
      -- Nobody listens there: that process is gone, and the next one's turn has come.
      if not to_tell or is_heard(p.channel) then
        hold(owner, p)
        if to_tell then
          say(p.channel, 'granted ' .. owner .. ' ' .. p.secret .. ' ' .. p.fence)
        end
        lease, is_full = math.min(lease or p.ttl, p.ttl), p.mode == 'x'
      end
    end
  end
end
