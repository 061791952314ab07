-- Release a lock that has no queue: only if its holder is claim ARGV[1].
local held = redis.call('GETRANGE', KEYS[1], '0', '32')
-- A star, where a client that knows queues waits for it.
if held == ARGV[1] .. ' ' or held == ARGV[1] .. '*' then
  return redis.call('DEL', KEYS[1])
end
return 0
