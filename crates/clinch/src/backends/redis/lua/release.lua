-- Release a lock or leave its queue, and hand it to whoever is next: one idempotent step.
--
-- ARGV[1] begins "<linger> <doubt> 0": for how many ms the lock stays closed; 1 when a step of the claim may still
-- arrive, which then finds the claim buried. Of the settings, `run` and `gap`: after how many ms of being handed over the
-- lock is left free for foreign clients (0: only where one was seen lately), and for how many (0: never). ARGV[2] claim id.
-- Answers 1: removed. 0: there was no such claim, or only what it had kept closed since it was evicted. {1 or 0, at}: the
-- same, and from there on the queue has to be looked at by `settle.lua`.
local id = ARGV[2]
local linger, doubt, run, gap = string.match(ARGV[1], '^(%d+) (%d) %S+ %d (%d+) (%d+)$')
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

local holds = string.sub(record or '', 1, 2) == 'h '
if linger > 0 or doubt == '1' then
  -- The first write: one that needs no memory, so that a full server does not refuse the script.
  call('HDEL', CLAIMS, '')
end
-- Whose lease was over has nothing left to keep closed.
if linger > 0 and (mine or holds and tonumber(call('ZSCORE', HOLDERS, id) or 0) > now) then
  call('HSET', CLAIMS, '.closed', int(math.max(now + linger, closed_until() or 0)))
  keep(linger)
end
if mine or evicted then
  -- The first write of most: one that needs no memory, too.
  call('DEL', LOCK)
  if not free then
    mark()
  end
end
if holds then
  call('HDEL', CLAIMS, id)
  if call('ZREM', HOLDERS, id) == 1 then
    mark(true, is_marker(held) and held or nil)
  end
elseif record then
  local first = ids[1] == id
  leave(id)
  ids = call('LRANGE', QUEUE, '0', '1')
  if first then
    announce(0)
  end
end
local head = ids[1]
local idle = false
if not head then
  local parts = call('ZCARD', HOLDERS)
  if parts == 0 then
    call('HDEL', CLAIMS, '.of', '.run', '.foreign')
  end
  idle = call('HLEN', CLAIMS) > parts + (parts > 0 and string.find(record or '', '^[hw] p') and 1 or 0)
end
if idle or doubt == '1' then
  -- While there is something left of others, no claim can take the fast way. Of many claims only some are looked at, from
  -- anywhere on; each who buries looks, so the dead do not grow in number.
  local some, waits = call('HSCAN', CLAIMS, string.sub(us, -6), 'COUNT', '100')[2], false
  for i = 1, #some, 2 do
    local field, is = some[i], some[i + 1]
    local ends = tonumber(string.match(is, field == '.closed' and '^%d+$' or '^x (%d+)$'))
    local _, place = waiter(is)
    if ends and ends <= now or idle and place and place <= now
      or string.sub(is, 1, 2) == 'h ' and not call('ZSCORE', HOLDERS, field) then
      call('HDEL', CLAIMS, field)
    end
    waits = waits or place and place > now
  end
  if idle and waits then
    -- They have records, and no queue.
    restore()
    ids = call('LRANGE', QUEUE, '0', '1')
    head = ids[1]
  end
end
if doubt == '1' then
  call('HSET', CLAIMS, id, 'x ' .. int(now + SPARE_MS))
  keep(SPARE_MS)
end

if gap > 0 and free and head then
  -- Foreign clients poll: a lock that is only ever handed over would never look free to them.
  local known = call('HMGET', CLAIMS, '.run', '.foreign')
  local since, foreign = tonumber(known[1] or nil), tonumber(known[2] or nil)
  if run == 0 and not (foreign and foreign > now) then
    if since or foreign then
      call('HDEL', CLAIMS, '.run', '.foreign')
    end
  elseif not since then
    call('HSET', CLAIMS, '.run', int(now))
  elseif now - since > math.max(run, RUN_MS) then
    call('HDEL', CLAIMS, '.run')
    call('HSET', CLAIMS, '.closed', int(now + gap))
    linger, free = gap, false
  end
end
if linger > 0 and head then
  announce(linger)
end
local at
if head then
  at = select(2, settle(nil, free, ids))
end
removed = removed and 1 or 0
return at and { removed, at } or removed
