-- Gives up whatever an owner has, a hold or a place in the queue, and hands over. Answers 1 if it held.
--   ARGV: owner, kind (lock, semaphore), '1' if others may listen without a place in the queue
local owner, is_lock = ARGV[1], ARGV[2] == 'lock'
local held, floor = 0, 0
clear_sharers(is_lock)
if is_lock and call('GET', HOLDER) == owner then
  local p = read(call('GET', HELD))
  if p then floor = p.fence + 1 end
  call('DEL', HOLDER, HELD)
  held = 1
elseif call('ZREM', SHARERS, owner) == 1 then
  call('HDEL', INFO, owner)
  if is_lock and call('EXISTS', SHARERS) == 0 then call('DEL', HOLDER) end
  held = 1
elseif call('ZREM', QUEUE, owner) == 1 then
  call('HDEL', INFO, owner)
end
move_on('', floor)
tell(ARGV[3])
return held
