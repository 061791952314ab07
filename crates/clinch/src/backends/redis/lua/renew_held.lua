-- Renew many exclusive locks: KEYS[i] if its holder is claim ARGV[2i-1], for ARGV[2i] ms. Answers 1 or 0 for each.
-- A lease never gets shorter: an older request may arrive after one that asked for more.
local call = redis.call
local answers = {}
for i = 1, #KEYS do
  local held, id = call('GETRANGE', KEYS[i], '0', '32'), ARGV[2 * i - 1]
  held = held == id .. ' ' or held == id .. '*'
  if held and call('PTTL', KEYS[i]) < tonumber(ARGV[2 * i]) then
    call('PEXPIRE', KEYS[i], ARGV[2 * i])
  end
  answers[i] = held and 1 or 0
end
return answers
