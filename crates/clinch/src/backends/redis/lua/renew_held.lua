-- Renew many exclusive locks: KEYS[i] if its holder is claim ARGV[2i-1], for ARGV[2i] ms. Answers for each 1, 0: it is not, or
-- -1: it was, until somebody evicted it.
-- A lease never gets shorter: an older request may arrive after one that asked for more. It is written also where it is long
-- enough: WAIT confirms only what was written.
local call = redis.call
local answers = {}
for i = 1, #KEYS do
  -- A key that holds no text is not the claim's, and must not end the renewals of the other locks.
  local holder, id = redis.pcall('GETRANGE', KEYS[i], '0', '32'), ARGV[2 * i - 1]
  if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE', 1, true) then
    return holder
  end
  local held = holder == id .. ' ' or holder == id .. '*'
  if held then
    local left, ttl = call('PTTL', KEYS[i]), ARGV[2 * i]
    call('PEXPIRE', KEYS[i], left > tonumber(ttl) and string.format('%d', left) or ttl)
  end
  answers[i] = held and 1 or holder == id .. '!' and -1 or 0
end
return answers
