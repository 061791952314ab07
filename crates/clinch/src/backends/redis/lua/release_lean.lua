-- Release a lock that has no queue: only if its holder is claim ARGV[1].
if redis.call('GETRANGE', KEYS[1], '0', '32') == ARGV[1] .. ' ' then
  return redis.call('DEL', KEYS[1])
end
return 0
