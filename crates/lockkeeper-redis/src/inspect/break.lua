-- Breaks a lock or semaphore: revokes all holds, notifies the holders, and hands the lock off. Returns the number of holders.
-- If there is more to clean up than one call may remove, the queue does not advance completely: the caller then runs
-- commands.lua.
--   ARGV: kind (lock, semaphore), '1' if claims may wait without a queue entry
local is_lock = ARGV[1] == 'lock'
local broken = 0
clear_sharers(is_lock)

local function take_from(p)
  broken = broken + 1
  if p and p.channel ~= '-' then publish(p.channel, 'look ' .. p.owner) end
end

for _, owner in ipairs(call('ZRANGEBYSCORE', SHARERS, '(' .. text(now), '+inf')) do
  take_from(read(call('HGET', INFO, owner)))
end
call('DEL', SHARERS, INFO)
if not is_lock then
  tally = nil
  read_tally()
end
if is_lock then
  local holder = call('GET', HOLDER)
  if holder and holder ~= READERS then
    local p = read(holder)
    if p and p.fence ~= '0' then minted[HOLDER] = tonumber(p.fence) end
    take_from(p)
  end
  call('DEL', HOLDER)
end
hand_off('')
if ARGV[2] == '1' then publish(HOLDER, 'free') end
return broken
