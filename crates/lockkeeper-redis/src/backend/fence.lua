-- Compares a fence with the highest fence of its name, stores it if it is not lower, and returns the highest.
-- Fences are below 2^63, and Lua's numbers are exact only below 2^53. So fences are compared as text without leading zeros:
-- the longer text is the higher fence.
--   KEYS: the highest fence
--   ARGV: the fence, how long to keep it in ms
local fence, highest = ARGV[1], redis.call('GET', KEYS[1])
if highest and not highest:find('^[1-9]%d*$') then
  return redis.error_reply('WRONGTYPE the highest fence is not a number')
end
if highest and (#highest > #fence or (#highest == #fence and highest > fence)) then return highest end
redis.call('SET', KEYS[1], fence, 'PX', ARGV[2])
return fence
