-- Release a lock that has no queue: only if its holder is claim ARGV[1]. One that was evicted opens what it had kept closed,
-- which is no release.
local held = redis.call('GETRANGE', KEYS[1], '0', '32')
-- A star, where a client that knows queues waits for it.
if held == ARGV[1] .. ' ' or held == ARGV[1] .. '*' then
  return redis.call('DEL', KEYS[1])
elseif held == ARGV[1] .. '!' then
  redis.call('DEL', KEYS[1])
end
return 0
