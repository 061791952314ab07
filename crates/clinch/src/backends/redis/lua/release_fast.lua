-- The way of an exclusive lock that nobody waits for. A release that lingers, or one in doubt, takes the long way.
local mine = redis.call('GETRANGE', KEYS[1], 0, 32) == ARGV[2] .. ' '
if mine and ARGV[3] == '0 0 0' and redis.call('EXISTS', KEYS[2]) == 0 then
  return redis.call('DEL', KEYS[1])
end
