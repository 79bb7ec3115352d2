-- Gives a lock back: the part for an exclusive lock that nobody waits for. Keys and arguments: see
-- release.lua, which goes on where this does not end it.
local call = redis.call
if call('GET', KEYS[1]) == ARGV[1] and call('EXISTS', KEYS[4]) == 0 then
  call('DEL', KEYS[1], KEYS[2])
  if ARGV[3] == '1' then redis.pcall('PUBLISH', KEYS[1], 'free') end
  return 1
end
