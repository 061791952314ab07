-- Evict claim ARGV[2], for an operator. A waiter leaves at once. What a holder has stays closed, marked by a "!" before the
-- token, until that claim is released, its lease would have ended, or ARGV[3] ms have passed: the holder has to hear of it
-- and to stop first. Opens a lock that lingers closed.
-- Answers 1, or 0: there is no such claim, or it was evicted before.
local id, notice = ARGV[2], tonumber(ARGV[3])
-- The first write: one that needs no memory, so that a full server does not refuse the script.
call('HDEL', CLAIMS, '.closed')
local record = call('HGET', CLAIMS, id) or ''
local score = tonumber(call('ZSCORE', HOLDERS, id) or nil)
local removed, ends = 1, now
if is_of(call('GETRANGE', LOCK, '0', '32'), id) then
  local left = call('PTTL', LOCK)
  left = left >= 0 and math.min(left, notice) or notice
  call('SETRANGE', LOCK, '32', '!')
  call('PEXPIRE', LOCK, int(left))
  ends = now + left
elseif score and string.find(record, '^h %S+ %d') then
  ends = math.min(score, now + notice)
  call('HSET', CLAIMS, id, (string.gsub(record, '^(h %S+ )', '%1!', 1)))
  call('ZADD', HOLDERS, int(ends), id)
elseif string.sub(record, 1, 2) == 'w ' then
  leave(id)
else
  removed = 0
end
mark()
announce(ends - now)
settle_some(nil)
return removed
