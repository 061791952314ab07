-- Evict the claim that has this server's vote, for an operator: the lock stays closed, marked by a "!" before the token, until
-- that claim is released, its lease would have ended, or ARGV[2] ms have passed. Its holder has to hear of it and to stop first.
--
-- KEYS[1] the lock. ARGV[1] claim id. Answers 1, or 0: it does not have the vote, or was evicted before.
local held = redis.call('GETRANGE', KEYS[1], 0, 32)
if held ~= ARGV[1] .. ' ' and held ~= ARGV[1] .. '*' then
  return 0
end
local left, notice = redis.call('PTTL', KEYS[1]), tonumber(ARGV[2])
left = left >= 0 and math.max(math.min(left, notice), 1) or notice
-- The first write: one that needs no memory, so that a full server does not refuse the script.
redis.call('PEXPIRE', KEYS[1], left)
redis.call('SETRANGE', KEYS[1], 32, '!')
return 1
