-- Asks for a lock. Answers the fence, as text, if the owner holds it now; else, as a number, how many
-- milliseconds are left of the lease in the way, or -1.
--   ARGV: owner, mode (x, s, p), ttl in ms, least fence, '1' to queue, and the rest of the record: a blank,
--         mode, permits to take, of how many, ttl, 0, number of this ask, channel, label
local owner, queue = ARGV[1], ARGV[5] == '1'
local p = read(text(us) .. ' ' .. ARGV[4] .. ARGV[6])
p.ends = now + p.ttl
local is_lock = p.mode ~= 'p'

-- If the owner holds: a full lease, at least the fence that is asked for, and the record as it is now.
local function held()
  local before
  if p.mode == 'x' then
    if call('GET', HOLDER) ~= owner then return nil end
    before = read(call('GET', HELD))
  else
    if not call('ZSCORE', SHARERS, owner) then return nil end
    before = read(call('HGET', INFO, owner))
  end
  local floor = p.fence
  if before then
    p.since, p.fence = before.since, math.max(before.fence, floor)
    if p.fence > before.fence then remember(p.fence) end
  else
    p.fence = mint(p.mode, floor)
  end
  hold(owner, p)
  return text(p.fence)
end

clear_sharers(is_lock)
local answer = held()
if answer then return answer end

local waits = queue and call('ZSCORE', QUEUE, owner)
if waits then
  -- Before the queue moves: it may be our turn, and the channel we gave before may be dead.
  local before = read(call('HGET', INFO, owner))
  if before then p.since = before.since end
  call('HSET', INFO, owner, write(p))
end
move_on(owner, 0)
waits = queue and call('ZSCORE', QUEUE, owner)
if not waits then
  answer = held()
  if answer then return answer end
  if call('EXISTS', QUEUE) == 0 and admits(p) then
    p.fence = mint(p.mode, p.fence)
    hold(owner, p)
    return text(p.fence)
  end
  if call('EXISTS', QUEUE) == 0 then
    -- Those who died while they waited have left their records.
    for _, other in ipairs(call('HKEYS', INFO)) do
      if not call('ZSCORE', SHARERS, other) then call('HDEL', INFO, other) end
    end
  end
  if queue then
    local last = call('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2]
    call('ZADD', QUEUE, text((last or 0) + 1), owner)
    call('HSET', INFO, owner, write(p))
  end
end
if queue then
  keep(QUEUE, p.ttl)
  keep(INFO, p.ttl)
end
if p.mode == 's' or is_lock and call('GET', HOLDER) ~= READERS then return call('PTTL', HOLDER) end
-- A writer needs all readers gone, a permit only one.
local which = is_lock and -1 or 0
local ends = call('ZRANGE', SHARERS, which, which, 'WITHSCORES')[2]
return ends and tonumber(ends) - now or -1
