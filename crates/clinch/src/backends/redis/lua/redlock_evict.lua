-- Evict the claim that has this server's vote, for an operator: the lock stays closed, marked by a "!" before the token, until
-- that claim is released, its lease would have ended, or ARGV[2] ms have passed. Its holder has to hear of it and to stop first.
--
-- KEYS[1] the lock. ARGV[1] claim id. Answers 1, or 0: it does not have the vote, or was evicted before.
local held = redis.call('GETRANGE', KEYS[1], 0, 32)
if held ~= ARGV[1] .. ' ' and held ~= ARGV[1] .. '*' then
  return 0
end
local left = redis.call('PTTL', KEYS[1])
if left < 0 or left > tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
redis.call('SETRANGE', KEYS[1], 32, '!')
return 1
