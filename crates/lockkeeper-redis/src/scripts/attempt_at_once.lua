-- Asks for a lock: the part for an exclusive lock that nobody has and nobody waits for, in four calls and
-- as little else as can be. Keys and arguments: see attempt.lua, which goes on where this does not end it.
local call = redis.call
if ARGV[2] == 'x' and call('EXISTS', KEYS[1], KEYS[4], KEYS[6]) == 0 then
  local clock = call('TIME')
  -- Texts of the same length compare as the numbers do.
  local us, floor = clock[1] .. string.sub('00000' .. clock[2], -6), ARGV[4]
  if #floor < #us or #floor == #us and floor <= us then
    call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
    call('SET', KEYS[2], us .. ' ' .. us .. ARGV[6], 'PX', ARGV[3])
    return us
  end
end
