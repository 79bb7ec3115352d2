-- Turns an exclusive hold into a shared one, with a new lease. Returns 1 if the owner holds, else 0; 2 if it holds and the
-- queue takes another call to advance.
--   ARGV: owner, ttl in ms, '1' if claims may wait without a place in the queue
local owner, ttl = ARGV[1], ARGV[2]
clear_sharers(true)
local p
if call('GET', HOLDER) == owner then
  p = read(call('GET', HELD)) or {since = us_text, fence = mint_or_fail('s', 0), tail = ' 0 - '}
  call('DEL', HOLDER, HELD)
elseif shares(owner, true) then
  p = read(call('HGET', INFO, owner))
end
if not p then return 0 end
p.mode, p.ttl, p.head = 's', ttl, ' s 1 1 ' .. ttl .. ' '
hold(owner, p)
move_on('')
if ARGV[3] == '1' then say(HOLDER, 'free') end
return more and 2 or 1
