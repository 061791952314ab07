-- Claim one server's vote for a lock: one idempotent step.
--
-- KEYS[1] the lock; [2] the fence, where there are tokens. ARGV[1] claim id; [2] TTL (ms); [3] the least token that will
-- do; [4] owner; [5] until when somebody waits for it, by this server's clock, in 16 digits.
-- Answers {1, server time in µs, token}: the vote is this claim's. {0, server time, ms left, holder}: it is another's.
-- {2, server time}: it came too late, and has changed nothing. {3, server time}: by a clock of which no token can be given, and has
-- changed nothing either; the time is told, so that its step is seen.
local clock = redis.call('TIME')
local us = clock[1] .. (#clock[2] == 6 and clock[2] or string.sub('00000' .. clock[2], -6))
-- From the year 2255 on the time is no token, and what was once given binds for ever. Before 2001 nobody has set the clock.
if #us ~= 16 or us >= '9007199254740992' then
  return { 3, us }
end
-- What a server finds in its buffers when it wakes would hold a vote that nobody gives back.
if us > ARGV[5] then
  return { 2, us }
end
local token = '0000000000000000'
if KEYS[2] then
  -- What a quorum's clocks say, where that is known: this server's own may be ahead.
  token = ARGV[3] >= '1000000000000000' and ARGV[3] or us
end

if redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. token .. ' ' .. us .. ' ' .. ARGV[4], 'NX', 'PX', ARGV[2]) then
  local last = KEYS[2] and redis.call('GETSET', KEYS[2], token)
  if last and #last == 16 and last >= token then
    -- All have 16 digits, so they compare as text. The clock went back, or two claims share a microsecond.
    if last >= '9007199254740992' then
      redis.call('SET', KEYS[2], last)
      redis.call('DEL', KEYS[1])
      error('no token follows what stands in the fence: set ' .. KEYS[2] .. ' to the last token that was given, or delete it if'
        .. ' the clock of this server was never ahead')
    end
    token = string.format('%d', tonumber(last) + 1)
    redis.call('SET', KEYS[2], token)
    redis.call('SETRANGE', KEYS[1], 33, token)
  end
  return { 1, us, token }
end

local left = redis.call('PTTL', KEYS[1])
local value = redis.call('GETRANGE', KEYS[1], 0, 1023)
-- A star, where a client of this server alone waits for it.
if not string.find(value, '^' .. ARGV[1] .. '[ *]') then
  return { 0, us, left, value }
end
-- An earlier step's answer was lost: the same token, and the TTL from now on.
if left < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return { 1, us, string.sub(value, 34, 49) }
