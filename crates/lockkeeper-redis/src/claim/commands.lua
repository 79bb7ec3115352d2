-- Attempts and releases that commands_fast.lua did not execute. That file describes the keys and arguments.

-- If the owner holds the lock: renews the lease, raises the fence to the floor, and writes the record as it is now.
local function held(p)
  local before
  if p.mode == 'x' then
    local holder = call('GET', HOLDER)
    if not is_of(holder, p.owner) then
      -- Removes the expired lease of a reader, if this owner has one.
      shares(p.owner, true)
      return nil
    end
    before = read(holder)
  else
    if not shares(p.owner, p.mode == 's') then return nil end
    before = read(call('HGET', INFO, p.owner))
  end
  local fence = ARGV[arg + 4]
  if before then
    p.since = before.since
    if before.fence ~= '0' then fence = before.fence end
  end
  if fence == '0' then
    -- The lock was acquired without a script, and the reply was lost.
    p.fence = mint_or_fail(p.mode, p.fence)
  elseif tonumber(p.fence) > tonumber(fence) then
    remember(tonumber(p.fence))
  else
    p.fence = fence
  end
  hold(p)
  return p.fence
end

-- Returns the time until the lease that blocks an attempt in this mode expires, in ms. Negative if there is none.
local function blocking_lease_ms(mode, is_lock)
  if mode == 's' or is_lock and call('GET', HOLDER) ~= READERS then return call('PTTL', HOLDER) end
  -- A writer waits for all readers, a permit for one holder.
  local which = is_lock and -1 or 0
  local ends = call('ZRANGE', SHARERS, which, which, 'WITHSCORES')[2]
  return ends and math.max(tonumber(ends) - now, 0) or -1
end

-- Adds a record to the end of the queue, unless it is there.
local function join(p, record, waits)
  if not waits then
    local last = call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2]
    -- On every 16th entry, check which waiters are alive. Usually a release does that, but all claims that could release
    -- may be dead.
    if last and last % 16 == 0 then hand_off(p.owner) end
    call('ZADD', QUEUE, text((last or 0) + 1), record)
  end
  keep(QUEUE, p.ttl)
end

local function attempt(word, owner, first_earlier, earlier)
  local queue, is_unconfirmed = string.find(word, 'q', 2, true), string.find(word, 'u', 2, true)
  local record = ARGV[arg + 5] .. ARGV[arg + 6] .. ARGV[arg + 7]
  local p = read(record)
  p.since = us_text
  check_floor(p.fence)
  local is_lock = p.mode ~= 'p'
  if is_unconfirmed and call('EXISTS', QUEUE) == 1 and is_of(call('GET', HOLDER), owner) then
    -- The claim acquired the lock ahead of the queue: hand it off to the head, and wait.
    call('DEL', HOLDER)
  end
  if p.mode == 'x' and call('EXISTS', HOLDER, QUEUE) == 0 then
    p.fence = mint_or_fail('x', p.fence)
    hold(p)
    return p.fence
  end

  -- If this call is repeated, the record is in the queue already.
  local waits = queue and call('ZSCORE', QUEUE, record)
  local holder = is_lock and call('GET', HOLDER)
  if holder and holder ~= READERS and not is_of(holder, owner) and queue and not waits and earlier == 0 then
    -- The lock is held exclusively, so it cannot be granted to a waiter.
    join(p, record, false)
    return call('PTTL', HOLDER)
  end

  clear_sharers(is_lock)
  local answer = held(p)
  if answer then return answer end
  for i = first_earlier, first_earlier + earlier - 1 do
    local position = not waits and call('ZSCORE', QUEUE, ARGV[i])
    if position then
      -- Removed before the queue advances: this claim may be next, and the channel in its earlier record may have no
      -- subscriber.
      call('ZREM', QUEUE, ARGV[i])
      call('ZADD', QUEUE, position, record)
      waits = true
    end
  end
  hand_off(owner)
  waits = waits and call('ZSCORE', QUEUE, record)
  if not waits then
    answer = held(p)
    if answer then return answer end
    if call('EXISTS', QUEUE) == 0 and admits(p) then
      p.fence = mint_or_fail(p.mode, p.fence)
      hold(p)
      return p.fence
    end
  end
  if queue then join(p, record, waits) end
  if more then return 'again' end
  local left = blocking_lease_ms(p.mode, is_lock)
  if queue then return left end
  -- A node of a quorum names the holder, so that a held lock can be distinguished from a split vote.
  return {left, is_lock and call('GET', HOLDER) or '-'}
end

-- Releases the hold of an owner, removes its queue entries, and hands the lock off.
local function release(word, owner, first_earlier, earlier)
  local is_lock, held = string.sub(word, 1, 1) == 'l', 0
  local holder = is_lock and call('GET', HOLDER)
  if is_of(holder, owner) then
    local p = read(holder)
    local fence = tonumber(ARGV[arg + 2])
    if string.find(word, 'f', 2, true) then fence = plausible(fence, p) end
    fence = math.max(fence, p and p.fence or 0, minted[HOLDER] or 0)
    minted[HOLDER] = fence
    -- Remove readers that lost the lock, so that a reader that is granted it next does not share it with them.
    if call('EXISTS', SHARERS) == 1 then clear_sharers(true) end
    call('DEL', HOLDER)
    remember(fence)
    held = 1
  else
    clear_sharers(is_lock)
    if shares(owner, is_lock) then
      remove_sharers({owner}, is_lock)
      if is_lock then remove_readers_key() end
      held = 1
    end
  end
  for i = first_earlier, first_earlier + earlier - 1 do call('ZREM', QUEUE, ARGV[i]) end
  hand_off('')
  if string.find(word, 't', 2, true) then publish(HOLDER, 'free') end
  -- Without waiters, the remaining cleanup can be left to later calls.
  if more and call('EXISTS', QUEUE) == 0 then more = false end
  return more and held .. ' again' or held
end

while key <= #KEYS do
  HOLDER, SHARERS, QUEUE, INFO, FENCE = unpack(KEYS, key, key + 4)
  local word, owner = ARGV[arg], ARGV[arg + 1]
  tally, more = nil, false
  local releases = string.find(word, '^[lm]')
  local words = releases and 4 or 9
  local earlier = tonumber(ARGV[arg + words - 1])
  local ran, answer = pcall(releases and release or attempt, word, owner, arg + words, earlier)
  if ran and type(answer) == 'string' and (tonumber(answer) or 0) > us then answer = answer .. ' ahead' end
  -- An error is a table since Redis 7, and a text before.
  if not ran and type(answer) ~= 'table' then answer = {err = tostring(answer)} end
  answers[#answers + 1] = answer
  key, arg = key + 5, arg + words + earlier
end
return answers
