-- Turn the exclusive hold of claim ARGV[2] into a shared one with the same token and lease, and let readers in.
-- Answers 1, or 0: the claim does not hold the lock.
local id = ARGV[2]
local value = redis.call('GETRANGE', LOCK, 0, 1023)
local token, since, owner = string.match(value, '^' .. id .. ' (%d+) (%d+) (.*)$')
if not token then
  local held = string.sub(redis.call('HGET', CLAIMS, id) or '', 1, 4) == 'h s '
  return held and tonumber(redis.call('ZSCORE', HOLDERS, id) or 0) > now and 1 or 0
end
local left = redis.call('PTTL', LOCK)
redis.call('HSET', CLAIMS, id, 'h s ' .. token .. ' ' .. since .. ' ' .. owner)
redis.call('ZADD', HOLDERS, int(now + left), id)
keep(HOLDERS, left)
redis.call('DEL', LOCK)
mark()
settle(nil)
return 1
