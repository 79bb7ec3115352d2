-- Takes a lock or semaphore away from all holders, notifies them, and hands it off. Returns how many held it. If there is
-- more to clean up than one call may, the queue does not advance as far as it could: run commands.lua after it.
--   ARGV: kind (lock, semaphore), '1' if claims may wait without a place in the queue
local is_lock = ARGV[1] == 'lock'
local broken = 0
clear_sharers(is_lock)

local function take_from(p)
  broken = broken + 1
  if p and p.channel ~= '-' then say(p.channel, 'look ' .. p.owner) end
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
move_on('')
if ARGV[2] == '1' then say(HOLDER, 'free') end
return broken
