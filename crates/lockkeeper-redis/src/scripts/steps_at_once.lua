-- Asks for locks and gives them back: several steps share a call, and are taken one after the other. This is
-- the part for those that need no more than a look or two, with as little else as can be: an exclusive lock
-- that nobody waits for is taken or given back. From the first other step on, steps.lua goes on.
--   KEYS: six for each step, see common.lua
--   ARGV: for each step that asks: mode (x, s, p), with a q behind it to queue; owner; ttl in ms; least fence;
--         and what stands in the record before and behind `ends`, with the blanks
--         for each that gives back: kind (l for a lock, m for a semaphore), with a t behind it if others may
--         listen without a place in the queue; owner
-- Answers for each step. To an ask: the fence, as text, if the owner holds now; else, as a number, how many
-- milliseconds are left of the lease in the way, or -1. To what gives back: 1 if the owner held, else 0. Or
-- an error: one does not keep the others from what they want.
local call, try = redis.call, redis.pcall
local HOLDER, HELD, SHARERS, QUEUE, INFO, FENCE
-- The last fence that each lock is known to have had: the clock may not have gone on since.
local minted = {}
local answers, key, arg = {}, 1, 1
local clock

while true do
  HOLDER = KEYS[key]
  if not HOLDER then return answers end
  local step, owner, answer, words = ARGV[arg], ARGV[arg + 1], nil, 2
  QUEUE = KEYS[key + 3]
  -- With `try`, because what fails here is seen to by the other part.
  if step == 'xq' or step == 'x' then
    words = 6
    if not minted[HOLDER] and call('EXISTS', HOLDER, QUEUE, KEYS[key + 5]) == 0 then
      if not clock then
        local time = call('TIME')
        clock = time[1] .. string.sub('00000' .. time[2], -6)
      end
      local ttl, floor = ARGV[arg + 2], ARGV[arg + 3]
      -- Texts of the same length compare as the numbers do.
      if (#floor < #clock or #floor == #clock and floor <= clock)
        and try('SET', HOLDER, owner, 'PX', ttl).ok then
        call('SET', KEYS[key + 1], clock .. ' ' .. clock .. ARGV[arg + 4] .. '0' .. ARGV[arg + 5],
          'PX', ttl)
        minted[HOLDER] = clock
        answer = clock
      end
    end
  elseif (step == 'l' or step == 'lt') and try('GET', HOLDER) == owner
    and call('EXISTS', QUEUE) == 0 then
    call('DEL', HOLDER, KEYS[key + 1])
    if step == 'lt' then try('PUBLISH', HOLDER, 'free') end
    answer = 1
  end
  if not answer then break end
  answers[#answers + 1] = answer
  key, arg = key + 6, arg + words
end
