-- Leave on a server what a client knows of it, unless another has left something new meanwhile; and give it the fence of the
-- others, which it may have forgotten.
--
-- KEYS[1] the voucher; [2] the fence, where there are tokens. ARGV[1] the voucher as the client knows it, empty if there is
-- none; [2] the new one; [3] the least fence, of 16 digits.
-- Answers the voucher that stands there then.
local known = redis.call('GET', KEYS[1]) or ''
if known ~= ARGV[1] then
  return known
end
if KEYS[2] then
  local last = redis.call('GET', KEYS[2])
  if not last or #last == 16 and last < ARGV[3] then
    redis.call('SET', KEYS[2], ARGV[3])
  end
end
redis.call('SET', KEYS[1], ARGV[2])
return ARGV[2]
