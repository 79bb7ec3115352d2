-- Attempts and releases: several commands share a call and run one after the other. This file is the fast path for
-- nearly all of them, with as few calls as possible: an attempt acquires a free exclusive lock or joins the queue, a
-- release frees the lock or hands it off to the head of the queue. It stops before the first other command, and
-- commands.lua continues from that command on.
--   KEYS: five for each command, see common.lua
--   ARGV: for each attempt:
--           mode (x, s, p), followed by flags: q to queue, u if the claim has just set the holder key itself and the grant is
--             not confirmed, a if the least fence may be ahead of the clock
--           owner; ttl in ms; least fence; the fence of the hold if the claim repeats an attempt that was granted,
--             else 0
--           its record (see common.lua) in three parts, with the blanks between them: up to `ttl`, from `since` to
--             `secret`, and from `channel` on
--           how many earlier records of this claim may be in the queue; those records
--         for each release:
--           kind (l for a lock, m for a semaphore), followed by flags: t if claims may wait without a queue entry, a if the
--             fence may be ahead of the clock, f if it comes from a quorum and must be bounded
--           owner; the fence of the hold, 0 if it is not known
--           how many records of this claim may be in the queue; those records
-- Returns one reply for each command:
--   attempt, granted:    the fence, as text, followed by ' ahead' if the clock has not reached it
--   attempt, contended:  the remaining time of the blocking lease in ms, negative if there is none; without the flag q also
--                        the value of the holder key ('-' if there is none)
--   attempt, limit:      'again': the cleanup limit was reached, and a repeated call may get another reply
--   release:             1 if the owner held the lock, else 0; followed by ' again' if the cleanup limit stopped the hand-off
--   or an error, which does not affect the other commands
local call, try = redis.call, redis.pcall
local answers, key, arg = {}, 1, 1

local HOLDER, SHARERS, QUEUE, INFO, FENCE
-- The last known fence of each lock of this call. The clock may not have advanced since.
local minted = {}
-- In microseconds, as text, and in milliseconds.
local clock, clock_ms
local function read_clock()
  if clock then return end
  local time = call('TIME')
  clock = time[1] .. string.sub('00000' .. time[2], -6)
  clock_ms = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Returns whether the clock has reached a fence. Texts of the same length compare as the numbers do.
local function is_reached(fence)
  return #fence < #clock or #fence == #clock and fence <= clock
end

-- Returns whether a channel has a subscriber on this node. Also true if the user lacks the permission to check. The reply
-- to PUBLISH comes too late and is not sufficient: it counts pattern subscribers, and on a cluster not the subscribers of
-- other nodes, which get the message.
local function has_subscriber(channel)
  local listeners = try('PUBSUB', 'NUMSUB', channel)
  return listeners.err or listeners[2] > 0
end

local function is_past(fence)
  return fence ~= clock and is_reached(fence)
end

-- Returns whether the value of the holder key is the record of this owner.
local function is_of(value, owner)
  return type(value) == 'string' and string.sub(value, 1, #owner + 1) == owner .. ' '
end

while true do
  HOLDER, SHARERS, QUEUE, INFO, FENCE = unpack(KEYS, key, key + 4)
  if not HOLDER then return answers end
  local word, owner, answer, words = ARGV[arg], ARGV[arg + 1], nil, 4
  if word == 'xq' or word == 'x' then
    words = 9
    if ARGV[arg + 8] == '0' then
      local ttl, floor, tail = ARGV[arg + 2], ARGV[arg + 3], ARGV[arg + 7]
      local holder = try('GET', HOLDER)
      if not holder then
        if not minted[HOLDER] and call('EXISTS', QUEUE, FENCE) == 0 then
          read_clock()
          if is_reached(floor) then
            local value = ARGV[arg + 5] .. clock .. ' ' .. clock .. ' 0 - ' .. tail
            if try('SET', HOLDER, value, 'PX', ttl).ok then
              minted[HOLDER] = clock
              answer = clock
            end
          end
        end
      elseif word == 'xq' and type(holder) == 'string' and holder ~= '(readers)' and not is_of(holder, owner) then
        -- The lock is held exclusively. Every sixteenth attempt checks which waiters are alive, in commands.lua.
        local last = try('ZREVRANGE', QUEUE, 0, 0, 'WITHSCORES')[2]
        if not last or last % 16 ~= 0 then
          local record = ARGV[arg + 5] .. ARGV[arg + 6] .. tail
          if try('ZADD', QUEUE, 'NX', (last or 0) + 1, record) == 1 then
            if call('PTTL', QUEUE) < tonumber(ttl) then
              call('PEXPIRE', QUEUE, string.format('%.0f', ttl + math.ceil(ttl / 10)))
            end
            answer = call('PTTL', HOLDER)
          end
        end
      end
    end
  elseif (word == 'l' or word == 'lt') and ARGV[arg + 3] == '0' then
    local holder = try('GET', HOLDER)
    local waiters = is_of(holder, owner) and try('ZRANGE', QUEUE, 0, 1)
    if waiters and not waiters.err then
      local head, after = waiters[1], waiters[2]
      if not head then
        call('DEL', HOLDER)
        answer = 1
      else
        read_clock()
        local fence, known = ARGV[arg + 2], string.match(holder, '^%S+ %S+ %S+ %S+ %S+ %S+ (%S+)')
        local head_owner, front, ttl, floor, ends, secret, channel, label = string.match(head,
          '^(%S+)( x 1 1 (%S+) )%S+ (%S+) (%S+) (%S+) (%S+)( .*)$')
        local next_front, next_ends = string.match(after or '', '^%S+( x 1 1 %S+ )%S+ %S+ (%S+)')
        -- Requires that
        --   * the head wants the lock exclusively and still waits,
        --   * the clock is past every fence (a stored fence is not above that of the exclusive holder),
        --   * the waiter behind the head, if any, retries as often as the head does, so it needs no notification.
        -- Otherwise hand_off in common.lua decides.
        if channel and channel ~= '-' and (tonumber(ends) or 0) > clock_ms and is_reached(floor)
          and not minted[HOLDER] and fence ~= '0' and is_past(fence) and is_past(known or '0')
          and (not after or next_front == front and (tonumber(next_ends) or 0) > clock_ms)
          and has_subscriber(channel) then
          call('ZREM', QUEUE, head)
          call('SET', HOLDER, head_owner .. front .. clock .. ' ' .. clock .. ' 0 - ' .. channel .. label, 'PX', ttl)
          try('PUBLISH', channel, 'granted ' .. head_owner .. ' ' .. secret .. ' ' .. clock)
          minted[HOLDER] = clock
          answer = 1
        end
      end
    end
    if answer and word == 'lt' then try('PUBLISH', HOLDER, 'free') end
  end
  if not answer then break end
  answers[#answers + 1] = answer
  key, arg = key + 5, arg + words
end
