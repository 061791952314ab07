-- Claim a lock: one idempotent step.
--
-- ARGV[1] begins "<mode: x, s, p<count>/<capacity>> <1 to take a place in the queue> <the claim's inbox, or ->"; [2] claim
-- id; [3] TTL (ms); [4] owner.
-- Answers the token: granted. {2, now, claims ahead, waiters ahead, ms until a look is worth taking, holder}: queued.
-- {3, ...}: busy, and nothing left behind. {4, capacity}: others say another. {5}: released or evicted before it came.
local id, ttl, owner = ARGV[2], tonumber(ARGV[3]), ARGV[4]
local mode, enqueue, listens = string.match(ARGV[1], '^(%S+) (%d) (%S+)')
local record = call('HGET', CLAIMS, id)
if record and string.sub(record, 1, 2) == 'x ' then
  return { 5 }
end

local value = lock_value()
if is_of(value, id) then
  -- Already granted: the same token, and the TTL from now on. Written also where it is that long: see `renew_held.lua`.
  call('PEXPIRE', LOCK, int(math.max(call('PTTL', LOCK), ttl)))
  return string.sub(value, 34, 49)
end
if record and string.sub(record, 1, 2) == 'h ' then
  local ends = tonumber(call('ZSCORE', HOLDERS, id) or 0)
  -- Beside the marker deleted by force, a foreign client may have taken the lock: see `renew.lua`.
  if ends > now and (value == '' or is_marker(value)) then
    if string.find(record, '^h %S+ !') then
      return { 5 }
    end
    -- The first write: one that needs no memory, so that a full server does not refuse the script.
    call('HDEL', CLAIMS, '')
    call('ZADD', HOLDERS, int(math.max(ends, now + ttl)), id)
    mark()
    return string.match(record, '^h %S+ (%d+)')
  end
  -- Its lease ran out, or was lost: it starts anew.
  call('ZREM', HOLDERS, id)
  call('HDEL', CLAIMS, id)
  record = nil
end

local capacity = string.match(mode, '/(%d+)$')
local of = capacity and call('HGET', CLAIMS, '.of')
-- Where nothing is said no permits are here.
if of and of ~= capacity then
  holders('1')
  -- Of graves there may be many.
  local all = call('EXISTS', HOLDERS, QUEUE) > 0 and call('HGETALL', CLAIMS) or {}
  for i = 2, #all, 2 do
    local other = string.match(all[i], '^[wh] p%d+/(%d+) ')
    if other and other ~= capacity then
      local _, ends = waiter(all[i])
      if (ends or tonumber(call('ZSCORE', HOLDERS, all[i - 1]) or 0)) > now then
        return { 4, other }
      end
    end
  end
end

local more, refused
local taken = value ~= '' and not is_marker(value)
if not taken and not record then
  -- Granted at once, where nobody stands ahead. A try is granted now or not at all: waiters ahead come first, unless none can
  -- be reached.
  local ids, at = call('LRANGE', QUEUE, '0', '1'), nil
  local all = not ids[1]
  refused = all
  if not all and enqueue ~= '1' then
    value = nil
    for _ = 1, TRIES do
      _, at, all = settle(nil, false, ids, at)
      ids = nil
      if not at then break end
    end
  end
  if all and admits(mode, value) then
    local token = next_token()
    grant(id, mode, token, owner, ttl, value)
    return token
  end
  value = value or lock_value()
end
if record or enqueue == '1' then
  if record then
    local _, ends, _, since, inbox = waiter(record)
    inbox = listens ~= '-' and listens or inbox
    record = 'w ' .. mode .. ' ' .. int(math.max(ends - ttl, now)) .. ' ' .. ARGV[3] .. ' ' .. since .. ' ' .. inbox
  else
    if call('RPUSH', QUEUE, id) > 1 and call('EXISTS', CLAIMS) == 0 then
      -- As on the short way.
      call('DEL', QUEUE)
      call('RPUSH', QUEUE, id)
    end
    record = 'w ' .. mode .. ' ' .. int(now) .. ' ' .. ARGV[3] .. ' ' .. us .. ' ' .. listens
  end
  record_of(id, mode, record .. ' ' .. owner)
  keep(ttl, QUEUE)
  if not taken and not refused then
    local token
    token, more = settle_some(id)
    if token then
      return token
    end
    value = lock_value()
  end
  local _, mark = string.find(value, '^%x+[ *!]')
  if mark == 33 and string.find(value, '^[1-9]%d+ %d+ {', 34) and string.sub(value, 50, 50) == ' ' then
    -- A record of ours, and with a token of 16 digits: its release has to look at the queue.
    if string.sub(value, 33, 33) == ' ' then
      call('SETRANGE', LOCK, '32', '*')
    end
  elseif value ~= '' and not is_marker(value) then
    -- Who polls gets no turn while the lock is only ever handed over: see `release.lua`.
    call('HSET', CLAIMS, '.foreign', int(now + FOREIGN_MS))
  end
end

-- Not granted: how many stand ahead, who holds, and when to look again if nobody tells.
local queued = enqueue == '1' or record
local ahead, lost
if queued then
  ahead, lost = place_of(id)
  if lost then
    restore()
    local token
    token, more = settle_some(id)
    if token then
      return token
    end
    ahead, value = place_of(id), lock_value()
  end
else
  ahead = call('LLEN', QUEUE)
end
local left = call('PTTL', LOCK)
local look, holder, parts = left, value, 0
if value == '' or is_marker(value) then
  local first = call('ZRANGEBYSCORE', HOLDERS, '(' .. int(now), '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
  local closed = closed_until()
  parts = call('ZCARD', HOLDERS)
  if first[1] then
    look = math.max(closed or now, tonumber(first[2])) - now
    holder = first[1] .. ' ' .. (call('HGET', CLAIMS, first[1]) or '')
  elseif closed or left == -2 then
    look = (closed or now) - now
  end
elseif value ~= '' then
  parts = 1
end
-- Who has to go on with the queue does so soon.
return { queued and 2 or 3, now, ahead + parts, more and 0 or ahead, look, holder, left }
