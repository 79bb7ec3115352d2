-- Asks for locks and gives them back: several steps share a call, and are taken one after the other. This is
-- the part for those that nearly all are, with as few calls and as little else as can be: of an exclusive lock,
-- whoever finds it free takes it, or gets in line, and whoever has it gives it back, or to the first in line. What
-- is anyhow different it leaves as it is, and from that step on, steps.lua goes on.
--   KEYS: six for each step, see common.lua
--   ARGV: for each step that asks: mode (x, s, p), with a q behind it to queue; owner; ttl in ms; least fence;
--         and what stands in the record before and behind `ends`, with the blanks
--         for each that gives back: kind (l for a lock, m for a semaphore), with a t behind it if others may
--         listen without a place in the queue; owner
-- Answers for each step. To an ask: the fence, as text, if the owner holds now; else, as a number, how many
-- milliseconds are left of the lease in the way, or -1, and for an ask that does not queue also the value of the
-- holder key ('-' if there is none); or 'again' if there is more to clean up than one call may, and the answer may be
-- another then. To what gives back: 1 if the owner held, else 0, with ' again' behind it if the queue
-- could not move on as far as it should for that reason. Or an error: one does not keep the others from what they want.
local call, try = redis.call, redis.pcall
local HOLDER, HELD, SHARERS, QUEUE, INFO, FENCE
-- The last fence that each lock is known to have had: the clock may not have gone on since.
local minted = {}
local answers, key, arg = {}, 1, 1
-- In microseconds, as text, and in milliseconds.
local clock, clock_ms
local function look_at_clock()
  if clock then return end
  local time = call('TIME')
  clock = time[1] .. string.sub('00000' .. time[2], -6)
  clock_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- With `try`, what fails here is seen to by the other part, and does not fail the steps that share the call.
while true do
  HOLDER, HELD, SHARERS, QUEUE, INFO, FENCE = unpack(KEYS, key, key + 5)
  if not HOLDER then return answers end
  local step, owner, answer, words = ARGV[arg], ARGV[arg + 1], nil, 2
  if step == 'xq' or step == 'x' then
    words = 6
    look_at_clock()
    local ttl, floor = ARGV[arg + 2], ARGV[arg + 3]
    local there = call('EXISTS', HOLDER, SHARERS, QUEUE, INFO, FENCE)
    -- Texts of the same length compare as the numbers do.
    local is_past = #floor < #clock or #floor == #clock and floor <= clock
    if there == 0 then
      if not minted[HOLDER] and is_past
        and try('SET', HOLDER, owner, 'PX', ttl).ok then
        call('SET', HELD, clock .. ' ' .. clock .. ARGV[arg + 4] .. '0' .. ARGV[arg + 5], 'PX', ttl)
        minted[HOLDER] = clock
        answer = clock
      end
    elseif step == 'xq' and is_past then
      local holder, last = try('GET', HOLDER), try('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2]
      -- Somebody has it for himself, and the only others are in line. (Every sixteenth sees who still waits.)
      if type(holder) == 'string' and holder ~= '(readers)' and holder ~= owner
        and there == (last and 3 or 1) and (not last or last % 16 ~= 0)
        and try('ZADD', QUEUE, 'NX', (last or 0) + 1, owner) == 1 then
        local ends = string.format('%.0f', clock_ms + ttl)
        local record = clock .. ' ' .. floor .. ARGV[arg + 4] .. ends .. ARGV[arg + 5]
        if type(try('HSET', INFO, owner, record)) == 'number' then
          for place = key + 3, key + 4 do
            if call('PTTL', KEYS[place]) < tonumber(ttl) then
              call('PEXPIRE', KEYS[place], string.format('%.0f', ttl + math.ceil(ttl / 10)))
            end
          end
          answer = call('PTTL', HOLDER)
        else
          call('ZREM', QUEUE, owner)
        end
      end
    end
  elseif step == 'l' or step == 'lt' then
    local others = try('GET', HOLDER) == owner and call('EXISTS', SHARERS, QUEUE, FENCE)
    if others == 0 then
      call('DEL', HOLDER, HELD)
      answer = 1
    elseif others == 1 then
      look_at_clock()
      local held, line = try('GET', HELD), try('ZRANGE', QUEUE, 0, 1)
      local heir, after = line[1], line[2]
      local records = heir and try('HMGET', INFO, heir, after or heir)
      local floor, before, ttl, ends, behind, secret, channel = string.match(
        records and records[1] or '', '^%S+ (%S+)( x 1 1 (%S+) )(%S+)( (%S+) (%S+) .*)$')
      local rest, rest_ends = string.match(
        after and records and records[2] or '', '^%S+ %S+( x 1 1 %S+ )(%S+)')
      local last = type(held) == 'string' and string.match(held, '^%S+ (%S+)')
      -- The heir wants it for himself, and still waits; the clock is ahead of every fence; and whoever is next asks
      -- as often as the heir does, so that he need not be told how long to wait. (As move_on has it, in common.lua.)
      if channel and tonumber(ends) > clock_ms
        and (#floor < #clock or #floor == #clock and floor <= clock)
        and last and (#last < #clock or #last == #clock and last < clock)
        and (not after or rest == before and tonumber(rest_ends) > clock_ms) then
        -- If nobody hears it, his process is gone.
        local listeners = try('PUBSUB', 'NUMSUB', channel)
        if listeners.err or listeners[2] > 0 then
          call('ZREM', QUEUE, heir)
          call('HDEL', INFO, heir)
          call('SET', HOLDER, heir, 'PX', ttl)
          call('SET', HELD, clock .. ' ' .. clock .. before .. '0' .. behind, 'PX', ttl)
          minted[HOLDER] = clock
          try('PUBLISH', channel, 'granted ' .. heir .. ' ' .. secret .. ' ' .. clock)
          answer = 1
        end
      end
    end
    if answer and step == 'lt' then try('PUBLISH', HOLDER, 'free') end
  end
  if not answer then break end
  answers[#answers + 1] = answer
  key, arg = key + 6, arg + words
end
