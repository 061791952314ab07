-- Read many exclusive locks: whether the holder of KEYS[i + 1] is claim ARGV[i]. Answers for each what `standing` says.
-- KEYS[1]: a key of the slot that is never there. To write there does nothing, and only a master may: what another server says of
-- a lock may be old.
redis.call('HDEL', KEYS[1], '')
local answers = {}
for i = 1, #ARGV do
  local held = standing(KEYS[i + 1], ARGV[i])
  if type(held) == 'table' then
    return held
  end
  answers[i] = held
end
return answers
