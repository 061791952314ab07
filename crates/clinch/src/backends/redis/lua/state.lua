-- Read one lock: {now (ms), the lock key, its PTTL, closed until (ms, 0: not), holders of parts, waiters}, the last two as
-- id, record, end (ms) in turn.
local parts, waiting = {}, {}
local ids = call('ZRANGE', HOLDERS, '0', '-1', 'WITHSCORES')
for i = 1, #ids, 2 do
  if tonumber(ids[i + 1]) > now then
    parts[#parts + 1] = ids[i]
    parts[#parts + 1] = call('HGET', CLAIMS, ids[i]) or ''
    parts[#parts + 1] = tonumber(ids[i + 1])
  end
end
ids = call('LRANGE', QUEUE, '0', '-1')
for i = 1, #ids do
  local record = call('HGET', CLAIMS, ids[i]) or ''
  local _, ends = waiter(record)
  if ends and ends > now then
    waiting[#waiting + 1] = ids[i]
    waiting[#waiting + 1] = record
    waiting[#waiting + 1] = ends
  end
end
return { now, lock_value(), call('PTTL', LOCK), closed_until() or 0, parts, waiting }
