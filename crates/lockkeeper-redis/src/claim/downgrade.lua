-- Turns an exclusive hold into a shared one, with a new lease. Returns 1 if the owner holds the lock, else 0; 2 if it does
-- and the cleanup limit was reached: another call advances the queue.
--   ARGV: owner, ttl in ms, fence of the hold, '1' if claims may wait without a queue entry, '1' if the fence may be that of a
--         forged ticket
local owner, ttl, fence = ARGV[1], ARGV[2], tonumber(ARGV[3])
clear_sharers(true)
local p
local holder = call('GET', HOLDER)
if is_of(holder, owner) then
  p = read(holder)
  if ARGV[5] == '1' then fence = plausible(fence, p) end
  if p.fence == '0' then p.fence = fence > 0 and text(fence) or mint_or_fail('s', 0) end
  -- Readers that are granted the lock beside this one must not have a lower fence.
  remember(math.max(fence, p.fence))
  call('DEL', HOLDER)
elseif shares(owner, true) then
  p = read(call('HGET', INFO, owner))
end
if not p then return 0 end
p.mode, p.ttl, p.front = 's', ttl, ' s 1 1 ' .. ttl .. ' '
hold(p)
hand_off('')
if ARGV[4] == '1' then publish(HOLDER, 'free') end
return more and 2 or 1
