-- Turn the exclusive hold of claim ARGV[2] into a shared one with the same token and lease, and let readers in. A lease
-- whose end an operator took away gets one again, ARGV[3] ms from now.
-- Answers 1, or 0: the claim does not hold the lock.
local id = ARGV[2]
local value = call('GETRANGE', LOCK, '0', '1023')
local token, since, owner = string.match(value, '^' .. id .. '[ *](%d+) (%d+) (.*)$')
if not token then
  local held = string.find(call('HGET', CLAIMS, id) or '', '^h s %d')
  return held and tonumber(call('ZSCORE', HOLDERS, id) or 0) > now and 1 or 0
end
local left = call('PTTL', LOCK)
left = left < 0 and tonumber(ARGV[3]) or left
-- The first write: one that needs no memory, so that a full server does not refuse the script.
call('HDEL', CLAIMS, '')
call('HSET', CLAIMS, id, 'h s ' .. token .. ' ' .. since .. ' ' .. owner)
call('ZADD', HOLDERS, int(now + left), id)
call('DEL', LOCK)
mark()
settle_some(nil)
return 1
