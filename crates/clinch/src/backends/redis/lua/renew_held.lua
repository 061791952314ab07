-- Renew many exclusive locks: KEYS[i] if its holder is claim ARGV[2i-1], for ARGV[2i] ms. Answers for each what `standing` says.
-- A lease never gets shorter: an older request may arrive after one that asked for more. It is written also where it is long
-- enough: WAIT confirms only what was written.
local call = redis.call
local answers = {}
for i = 1, #KEYS do
  local held = standing(KEYS[i], ARGV[2 * i - 1])
  if type(held) == 'table' then
    return held
  end
  if held == 1 then
    local left, ttl = call('PTTL', KEYS[i]), ARGV[2 * i]
    call('PEXPIRE', KEYS[i], left > tonumber(ttl) and string.format('%d', left) or ttl)
  end
  answers[i] = held
end
return answers
