-- Takes a lock or semaphore away from all holders, notifies them, and hands over. Returns how many held. If there is more
-- to clean up than one call may, the queue does not advance as far as it could: run commands.lua after it.
--   ARGV: kind (lock, semaphore), '1' if claims may wait without a place in the queue
local is_lock = ARGV[1] == 'lock'
local broken = 0
clear_sharers(is_lock)

local function take_from(owner, p)
  broken = broken + 1
  if p and p.channel ~= '-' then say(p.channel, 'look ' .. owner) end
end

for _, owner in ipairs(call('ZRANGEBYSCORE', SHARERS, '(' .. text(now), '+inf')) do
  take_from(owner, read(call('HGET', INFO, owner)))
  call('HDEL', INFO, owner)
end
call('DEL', SHARERS)
if not is_lock then
  call('HDEL', INFO, TALLY)
  tally = nil
  read_tally()
end
if is_lock then
  local holder = call('GET', HOLDER)
  if holder and holder ~= READERS then
    local p = read(call('GET', HELD))
    if p then minted[HOLDER] = tonumber(p.fence) end
    take_from(holder, p)
  end
  call('DEL', HOLDER, HELD)
end
move_on('')
if ARGV[2] == '1' then say(HOLDER, 'free') end
return broken
