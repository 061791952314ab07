-- Release a lock or leave its queue, and hand it to whoever is next: one idempotent step.
--
-- ARGV[1] begins "<linger> <doubt> 0": for how many ms the lock stays closed; 1 when a step of the claim may still
-- arrive, which then finds the claim buried. Of the settings, `run` and `gap`: after how many ms of being handed over the
-- lock is left free for foreign clients, and for how many (0: never). ARGV[2] claim id.
-- Answers 1: removed. 0: there was no such claim, or only what it had kept closed since it was evicted.
local id = ARGV[2]
local linger, doubt, run, gap = string.match(ARGV[1], '^(%d+) (%d) %S+ %S+ %d (%d+) (%d+) ')
linger, run, gap = tonumber(linger), tonumber(run), tonumber(gap)
local record = not mine and call('HGET', CLAIMS, id)
record = record and string.sub(record, 1, 2) ~= 'x ' and record
local evicted = held == id .. '!'
if evicted or string.find(record or '', '^h %S+ !') then
  linger = 0
end
local removed = mine or record and not string.find(record, '^h %S+ !')
local free = (mine or evicted) and linger == 0
local ids = call('LRANGE', QUEUE, '0', '1')

if linger > 0 and (mine or string.sub(record or '', 1, 2) == 'h ') then
  call('HSET', CLAIMS, '.closed', int(math.max(now + linger, closed_until() or 0)))
  keep(linger)
end
if mine or evicted then
  -- The first write: one that needs no memory, so that a full server does not refuse the script.
  call('DEL', LOCK)
  if not free then
    mark()
  end
end
if record then
  local first = ids[1] == id
  leave(id)
  ids = call('LRANGE', QUEUE, '0', '1')
  local next_id = first and ids[1]
  local _, _, _, _, inbox = waiter(next_id and call('HGET', CLAIMS, next_id))
  if inbox then
    tell(inbox, 'n ' .. next_id .. ' ' .. int(now) .. ' 0')
  end
  if call('ZREM', HOLDERS, id) == 1 then
    mark()
  end
end
local head = ids[1]
local idle = not head and call('HLEN', CLAIMS) > call('ZCARD', HOLDERS)
if idle or doubt == '1' and string.sub(us, -1) == '0' then
  -- While there are buried, no claim can take the fast way. Among many claims to look for them takes its time: there,
  -- one in ten who bury does.
  local all = call('HGETALL', CLAIMS)
  for i = 1, #all, 2 do
    local ends = tonumber(string.match(all[i + 1], '^x (%d+)$'))
    if ends and ends <= now then
      call('HDEL', CLAIMS, all[i])
    end
  end
end
if doubt == '1' then
  call('HSET', CLAIMS, id, 'x ' .. int(now + SPARE_MS))
  keep(SPARE_MS)
end

if run > 0 and free then
  -- Foreign clients poll: a lock that is only ever handed over would never look free to them.
  local since = tonumber(call('HGET', CLAIMS, '.run') or nil)
  if not head then
    call('HDEL', CLAIMS, '.run')
  elseif not since then
    call('HSET', CLAIMS, '.run', int(now))
  elseif now - since > run then
    call('HDEL', CLAIMS, '.run')
    call('HSET', CLAIMS, '.closed', int(now + gap))
    linger, free = gap, false
  end
end
if linger > 0 and head then
  -- Who is next knows an end that no longer counts.
  local _, _, _, _, inbox = waiter(call('HGET', CLAIMS, head))
  if inbox then
    tell(inbox, 'n ' .. head .. ' ' .. int(now) .. ' ' .. int(linger))
  end
end
if head then
  settle(nil, free, ids)
end
return removed and 1 or 0
