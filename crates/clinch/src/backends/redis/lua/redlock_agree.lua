-- Write back the token that the servers agree on: no claim of this lock will get a smaller one from this server.
--
-- KEYS[1] the lock; [2] the fence. ARGV[1] claim id; [2] token.
-- Answers 1, or 0 when the claim does not have this server's vote: what it wrote then would bind nobody in time.
local held = redis.call('GETRANGE', KEYS[1], 0, 32)
-- A star, where a client of this server alone waits for it.
if held ~= ARGV[1] .. ' ' and held ~= ARGV[1] .. '*' then
  return 0
end
redis.call('SETRANGE', KEYS[1], 33, ARGV[2])
local last = redis.call('GET', KEYS[2])
if not last or #last ~= 16 or last < ARGV[2] then
  redis.call('SET', KEYS[2], ARGV[2])
end
return 1
