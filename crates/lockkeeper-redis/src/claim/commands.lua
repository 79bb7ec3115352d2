-- Attempts and releases that commands_fast.lua has left. That file names the keys and arguments.

-- If the owner holds: a full lease, at least the fence that is asked for, and the record as it is now.
local function held(owner, p)
  local before
  if p.mode == 'x' then
    if call('GET', HOLDER) ~= owner then
      -- A lease of before, as a reader: its record must not be taken for the one that it waits with.
      shares(owner, true)
      return nil
    end
    before = read(call('GET', HELD))
  else
    if not shares(owner, p.mode == 's') then return nil end
    before = read(call('HGET', INFO, owner))
  end
  if before then
    local floor = tonumber(p.fence)
    p.since = before.since
    if floor > tonumber(before.fence) then remember(floor) else p.fence = before.fence end
  else
    p.fence = mint_or_fail(p.mode, p.fence)
  end
  hold(owner, p)
  return p.fence
end

-- How long it takes until the lease that is in the way of such a mode must have ended.
local function in_the_way(mode, is_lock)
  if mode == 's' or is_lock and call('GET', HOLDER) ~= READERS then return call('PTTL', HOLDER) end
  -- A writer needs all readers gone, a permit only one.
  local which = is_lock and -1 or 0
  local ends = call('ZRANGE', SHARERS, which, which, 'WITHSCORES')[2]
  return ends and math.max(tonumber(ends) - now, 0) or -1
end

-- Called when the queue is empty: removes records of waiters that died. Looks at some of all records at random, so the cost does not
-- depend on how many hold.
local function forget_the_dead(is_lock)
  local needed = call('ZCARD', SHARERS) + (is_lock and 0 or call('HEXISTS', INFO, TALLY))
  if call('HLEN', INFO) <= needed then return end
  local some, dead = call('HRANDFIELD', INFO, 64), {}
  for i, ends in ipairs(call('ZMSCORE', SHARERS, unpack(some))) do
    if not ends and some[i] ~= TALLY then dead[#dead + 1] = some[i] end
  end
  if #dead > 0 then call('HDEL', INFO, unpack(dead)) end
end

-- A place in the queue; the one that the owner has, if it has one.
local function join(owner, p, waits)
  if not waits then
    local last = call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2]
    if not last then
      forget_the_dead(p.mode ~= 'p')
    elseif last % 16 == 0 then
      -- Now and then, because the claims that would otherwise do so may all be dead: check which waiters are alive.
      move_on(owner)
    end
    call('ZADD', QUEUE, text((last or 0) + 1), owner)
    call('HSET', INFO, owner, write(p))
  end
  keep(QUEUE, p.ttl)
  keep(INFO, p.ttl)
end

local function attempt(step, owner)
  local queue = string.sub(step, 2) == 'q'
  local p = {mode = string.sub(step, 1, 1), ttl = ARGV[arg + 2], fence = ARGV[arg + 3],
    head = ARGV[arg + 4], tail = ARGV[arg + 5], since = us_text}
  p.ends = text(now + p.ttl)
  check_floor(p.fence)
  local is_lock = p.mode ~= 'p'
  if p.mode == 'x' and call('EXISTS', HOLDER, QUEUE) == 0 then
    p.fence = mint_or_fail('x', p.fence)
    hold(owner, p)
    return p.fence
  end
  local holder = is_lock and call('GET', HOLDER)
  local waits = queue and call('ZSCORE', QUEUE, owner)
  if holder and holder ~= READERS and holder ~= owner and queue and not waits
    and call('EXISTS', SHARERS) == 0 then
    -- It is held exclusively, so no waiter's turn has come. (Unless readers have lost it to this holder: this may be
    -- one of them, and its old record is not the one to wait with.)
    join(owner, p, false)
    return call('PTTL', HOLDER)
  end

  clear_sharers(is_lock)
  local answer = held(owner, p)
  if answer then return answer end
  if waits then
    -- Before the queue moves: it may be our turn, and the channel we gave before may be dead.
    local before = read(call('HGET', INFO, owner))
    if before then p.since = before.since end
    call('HSET', INFO, owner, write(p))
  end
  move_on(owner)
  waits = queue and call('ZSCORE', QUEUE, owner)
  if not waits then
    answer = held(owner, p)
    if answer then return answer end
    if call('EXISTS', QUEUE) == 0 and admits(p) then
      p.fence = mint_or_fail(p.mode, p.fence)
      hold(owner, p)
      return p.fence
    end
  end
  if queue then
    join(owner, p, waits)
  elseif call('EXISTS', QUEUE) == 0 then
    forget_the_dead(is_lock)
  end
  if more then return 'again' end
  local left = in_the_way(p.mode, is_lock)
  if queue then return left end
  -- A node of a quorum names the holder, so that a held lock can be distinguished from a split vote.
  return {left, is_lock and call('GET', HOLDER) or '-'}
end

-- Releases what an owner has, a hold or a place in the queue, and hands over.
local function give_back(step, owner)
  local is_lock = step == 'l' or step == 'lt'
  local held = 0
  if is_lock and call('GET', HOLDER) == owner then
    local fence = string.match(call('GET', HELD) or '', '^%S+ (%S+)')
    minted[HOLDER] = math.max(fence or 0, minted[HOLDER] or 0)
    -- Readers that lost the lock: one that enters now must not find them beside it.
    if call('EXISTS', SHARERS) == 1 then clear_sharers(true) end
    call('DEL', HOLDER, HELD)
    held = 1
  else
    clear_sharers(is_lock)
    if shares(owner, is_lock) then
      remove_sharers({owner}, is_lock)
      if is_lock then end_reading() end
      held = 1
    elseif call('ZREM', QUEUE, owner) == 1 then
      call('HDEL', INFO, owner)
    end
  end
  move_on('')
  if step == 'lt' or step == 'mt' then say(HOLDER, 'free') end
  -- Without waiters, the remaining cleanup can be left to later calls.
  if more and call('EXISTS', QUEUE) == 0 then more = false end
  return more and held .. ' again' or held
end

while key <= #KEYS do
  HOLDER, HELD, SHARERS, QUEUE, INFO, FENCE = unpack(KEYS, key, key + 5)
  local step, owner = ARGV[arg], ARGV[arg + 1]
  tally, more = nil, false
  local gives_back = step == 'l' or step == 'lt' or step == 'm' or step == 'mt'
  local taken, answer = pcall(gives_back and give_back or attempt, step, owner)
  -- An error is a table since Redis 7, and a text before.
  if not taken and type(answer) ~= 'table' then answer = {err = tostring(answer)} end
  answers[#answers + 1] = answer
  key, arg = key + 6, arg + (gives_back and 2 or 6)
end
return answers
