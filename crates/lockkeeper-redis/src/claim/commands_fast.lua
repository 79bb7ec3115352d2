-- Attempts and releases: several commands share a call and run one after the other. This is the fast path for nearly all of
-- them, with as few calls as possible: an attempt takes a free exclusive lock or joins the queue, a release frees the lock or
-- hands it to the head of the queue. It leaves everything else unchanged, and commands.lua continues from that command on.
--   KEYS: six for each command, see common.lua
--   ARGV: for each attempt: mode (x, s, p), followed by q to queue; owner; ttl in ms; least fence; and the parts of the
--         record before and behind `ends`, with the blanks
--         for each release: kind (l for a lock, m for a semaphore), followed by t if claims may wait without a place in
--         the queue; owner
-- Returns a reply for each command. To an attempt: the fence, as text, if the owner holds now; else, as a number, how many
-- milliseconds are left of the lease in the way, or -1, and for an attempt that does not queue also the value of the
-- holder key ('-' if there is none); or 'again' if there is more to clean up than one call may, and the reply may then
-- differ. To a release: 1 if the owner held, else 0, followed by ' again' if the queue could not advance as far as it
-- should for that reason. Or an error, which does not affect the other commands.
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

-- With `try`, the other part handles what fails here, and the other commands of the call do not fail.
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
      -- It is held exclusively, and all others are queued. (Every sixteenth attempt checks which waiters are alive.)
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
      -- The heir wants it exclusively, and still waits; the clock is ahead of every fence; and the next waiter retries as
      -- often as the heir does, so that it need not be notified how long to wait. (As move_on does, in common.lua.)
      if channel and tonumber(ends) > clock_ms
        and (#floor < #clock or #floor == #clock and floor <= clock)
        and last and (#last < #clock or #last == #clock and last < clock)
        and (not after or rest == before and tonumber(rest_ends) > clock_ms) then
        -- Without a subscriber, its process is gone.
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
