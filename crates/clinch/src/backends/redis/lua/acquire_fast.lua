-- The two ways of exclusive claims, ahead of everything else.
local exclusive = string.sub(ARGV[1], 1, 2) == 'x '
-- Uncontended: no claims key means that nobody queues and nobody holds a part, and SET NX finds the lock free for foreign
-- clients too.
local bare = exclusive and call('EXISTS', KEYS[2]) == 0
if bare then
  -- A full server refuses that: the lock may have been handed to the claim nevertheless, or be another's, which is seen below.
  local known, token = pcall(next_token)
  if known and call('SET', KEYS[1], ARGV[2] .. ' ' .. token .. ' ' .. us .. ' ' .. ARGV[4], 'NX', 'PX', ARGV[3]) then
    return token
  end
end
-- Into the queue of a lock that is known to have one, for the first time.
local inbox = exclusive and string.match(ARGV[1], '^x 1 (%S+) ')
local value = inbox and call('GETRANGE', KEYS[1], '0', '1023')
if inbox and string.sub(value, 33, 33) == '*' and string.sub(value, 1, 32) ~= ARGV[2] then
  local record = 'w x ' .. string.sub(us, 1, 13) .. ' ' .. ARGV[3] .. ' ' .. us .. ' ' .. inbox .. ' ' .. ARGV[4]
  if call('HSETNX', KEYS[2], ARGV[2], record) == 1 then
    local length = call('RPUSH', KEYS[3], ARGV[2])
    if bare and length > 1 then
      -- The records were lost of all who stood there: each of them asks anew, and stands there once.
      call('DEL', KEYS[3])
      length = call('RPUSH', KEYS[3], ARGV[2])
    end
    local ms = tonumber(ARGV[3])
    if call('PTTL', KEYS[3]) < ms then
      local time = string.format('%d', ms + SPARE_MS)
      call('PEXPIRE', KEYS[3], time)
      if call('PTTL', KEYS[2]) < ms then
        call('PEXPIRE', KEYS[2], time)
      end
    end
    local left = call('PTTL', KEYS[1])
    return { 2, string.sub(us, 1, 13), length, length - 1, left, value, left }
  end
end
