-- Give a server the fence of the others, which it may have forgotten; and leave there what a client knows of it, unless another
-- has left something new meanwhile.
--
-- KEYS[1] the voucher; [2] the fence, where there are tokens. ARGV[1] the voucher as the client knows it, empty if there is
-- none; [2] the new one; [3] the least fence, of 16 digits; [4] what every voucher of this key begins with.
-- Answers the voucher that stands there then.
-- First of all: it only rises, so it does no harm, whatever others have left.
if KEYS[2] then
  local last = redis.call('GET', KEYS[2])
  if not last or #last == 16 and last < ARGV[3] then
    redis.call('SET', KEYS[2], ARGV[3])
  end
end
local known = redis.pcall('GET', KEYS[1])
-- What is no voucher counts as nothing, and is overwritten.
if type(known) ~= 'string' or string.sub(known, 1, #ARGV[4]) ~= ARGV[4] then
  known = ''
end
if known ~= ARGV[1] then
  return known
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', VOUCHED_MS)
return ARGV[2]
