-- Turns an exclusive hold into a shared one, with a new lease. Answers 1 if the owner holds, else 0.
--   ARGV: owner, ttl in ms, '1' if others may listen without a place in the queue
local owner, ttl = ARGV[1], tonumber(ARGV[2])
clear_sharers(true)
local p
if call('GET', HOLDER) == owner then
  p = read(call('GET', HELD))
    or {take = 1, of = 1, since = us, seq = '0', channel = '-', fence = mint('s', 0), label = ''}
  call('DEL', HOLDER, HELD)
elseif call('ZSCORE', SHARERS, owner) then
  p = read(call('HGET', INFO, owner))
end
if not p then return 0 end
p.mode, p.ttl = 's', ttl
hold(owner, p)
move_on('', 0)
tell(ARGV[3])
return 1
