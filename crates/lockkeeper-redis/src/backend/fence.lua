-- Compares a fence with the highest of its name, and replaces that if it is not lower. Returns the highest. Fences go up to 2^63 and Lua's numbers are exact to 2^53 only, so they are compared as text: of
-- two without leading zeros the longer is the higher.
--   KEYS: the highest fence
--   ARGV: the fence, how long it is remembered in ms
local fence, highest = ARGV[1], redis.call('GET', KEYS[1])
if highest and not highest:find('^[1-9]%d*$') then
  return redis.error_reply('WRONGTYPE the highest fence is no number')
end
if highest and (#highest > #fence or (#highest == #fence and highest > fence)) then return highest end
redis.call('SET', KEYS[1], fence, 'PX', ARGV[2])
return fence
