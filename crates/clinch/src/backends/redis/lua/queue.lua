-- The queue of one lock: what the steps share.
--
-- KEYS[1] the lock: the one holder's record ("<claim id> <token> <since µs> <owner>", with a star in place of the first
--   space from when somebody may wait on, and a "!" from when the holder was evicted on) or, while several hold parts of it or it stays closed, a marker that begins with
--   "clinch ". Its expiry is the lease. Anything else is a foreign client's, which excludes us as we exclude it.
-- KEYS[2] the claims, a hash: claim id -> "w <mode> <its place counts from, ms> <ttl, ms> <since µs> <inbox> <owner>" of a
--   waiter, "h <mode> <token> <since µs> <owner>" of the holder of a part (with a "!" before the token of one that was
--   evicted), or "x <until, ms>" of a claim that was released
--   in doubt and may not come back until then; ".closed" -> until when nobody of ours is granted; ".run" -> since when
--   the lock was handed over without being free in between; ".foreign" -> until when that a client was seen that may poll
--   counts; ".of" -> the capacity that all permits here say.
-- KEYS[3] the queue, a list: waiting claim ids in their order.
-- KEYS[4] the holders of parts, a sorted set: claim ids by the end of their lease (ms).
-- KEYS[5] the fence: the last token of the hash slot. The only key without an expiry.
-- What stands here with an end keeps it, whatever others do: no claim shortens or removes what is not its own, and the marker
--   counts until its own end, even when the records that explain it are lost.
-- ARGV[1] "<three words of the step> <1 when the answer of PUBLISH counts every receiver> <run> <gap>", in one argument, since
--   each costs the server time. So does each byte of each text that a script makes, each function that it makes, each number
--   that is to become text, and each command.
local LOCK, CLAIMS, QUEUE, HOLDERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local now = tonumber(string.sub(us, 1, 13))

-- Grants per script, so that a thousand readers let in at once do not block the server; and waiters who are dead, or who
-- cannot be told, per script.
local GRANTS, PASSES = 64, 256
-- How many times as many dead a try passes, which has one script alone.
local TRIES = 8
-- WINDOW_MS: how long a grant that is pushed to a waiter lives unless the waiter renews it, which is what a dead one costs at
-- most. SPARE_MS: how much longer than their last claim side keys live. Both are put in by `script.rs`.

local function int(number)
  return string.format('%d', number)
end

local function waiter(record)
  local mode, from, ttl, since, inbox, owner = string.match(record or '', '^w (%S+) (%d+) (%d+) (%d+) (%S+) (.*)$')
  return mode, from and tonumber(from) + tonumber(ttl), tonumber(ttl), since, inbox, owner
end

local function is_marker(value)
  return value == 'clinch parts' or value == 'clinch closed'
end

-- What stands in the lock's key, as much as is of use; '' only when there is none.
local function lock_value()
  local value = call('GETRANGE', LOCK, '0', '1023')
  return value == '' and call('EXISTS', LOCK) == 1 and ' ' or value
end

-- Whether the lock's key, of which this is the beginning, is the claim's.
local function is_of(value, id)
  return string.sub(value, 1, 32) == id and string.find(value, '^[ *]', 33)
end

-- Until when the lock stays closed although nobody holds it, or nil.
local function closed_until()
  local closed = tonumber(call('HGET', CLAIMS, '.closed') or nil)
  return closed and closed > now and closed or nil
end

-- Until when parts are held or the lock is closed, by the records; 0: neither. And who holds last.
local function shut_until()
  local last = call('ZREVRANGE', HOLDERS, '0', '0', 'WITHSCORES')
  return math.max(tonumber(last[2] or 0), closed_until() or 0), last[1]
end

-- Lets the claims, and a side key with them, live for this long at least. `all`: nothing in there is to live for longer. A
-- key without an end is new, or an operator took its end away: then it holds more than the claim of this step, perhaps.
local function keep(ms, key, all)
  if key and call('PTTL', key) < ms then
    call('PEXPIRE', key, int(ms + SPARE_MS))
  end
  local left = call('PTTL', CLAIMS)
  if left < ms then
    if left < 0 and not all then
      ms = math.max(ms, shut_until() - now)
    end
    call('PEXPIRE', CLAIMS, int(ms + SPARE_MS))
  end
end

-- So many holders of parts whose lease has not run out, after these, in the order of their ends.
local function living(after, count)
  return call('ZRANGEBYSCORE', HOLDERS, '(' .. int(now), '+inf', 'LIMIT', after, count)
end

-- Forgets holders of parts whose lease has run out, 256 at a time; answers the first of the others, up to so many.
local function holders(count)
  if count == '1' then
    local first = call('ZRANGE', HOLDERS, '0', '0', 'WITHSCORES')
    if not first[1] or tonumber(first[2]) > now then
      return { first[1] }
    end
  end
  local dead = call('ZRANGEBYSCORE', HOLDERS, '-inf', int(now), 'LIMIT', '0', '256')
  for i = 1, #dead do
    call('HDEL', CLAIMS, dead[i])
    call('ZREM', HOLDERS, dead[i])
  end
  return living('0', count)
end

-- Puts the marker of the holders of parts into the lock key, so that foreign clients are shut out until the last lease
-- ends, or takes it away when nobody is left; and keeps their records for as long. `removed`: the step took a holder away.
-- `value`: what the key holds, where that is known.
local function mark(removed, value)
  value = value or lock_value()
  if value ~= '' and not is_marker(value) then
    return false
  end
  local ends, last = shut_until()
  if not last and not removed and value == 'clinch parts' then
    -- The records of what it stands for are lost, but not its end.
    return true
  elseif ends <= now then
    call('DEL', LOCK)
  else
    call('SET', LOCK, last and 'clinch parts' or 'clinch closed', 'PX', int(ends - now))
    keep(ends - now, HOLDERS, true)
  end
  return true
end

-- Whether a claim of this mode, with nobody ahead of it in the queue, can be granted; and what the lock key holds, which may be
-- known.
local function admits(mode, value)
  value = value or lock_value()
  if value ~= '' and not is_marker(value) then
    return false, value
  end
  if closed_until() then
    return false, 'clinch closed'
  end
  -- All have one mode: permits are counted, of others one is enough.
  local count, capacity = string.match(mode, '^p(%d+)/(%d+)$')
  local ids = holders(count and '256' or '1')
  if #ids == 0 then
    -- Of a marker the records may be lost, but not the end.
    return value == '', value
  end
  if not count then
    return mode == 's' and string.sub(call('HGET', CLAIMS, ids[1]) or '', 1, 4) == 'h s ', value
  end
  local room, at = tonumber(capacity) - tonumber(count), 0
  while ids[1] and room >= 0 do
    local records = call('HMGET', CLAIMS, unpack(ids))
    for i = 1, #ids do
      local held = string.match(records[i] or '', '^h p(%d+)/')
      if not held then
        return false, value
      end
      room = room - tonumber(held)
    end
    at = at + 256
    ids = #ids == 256 and living(int(at), '256') or {}
  end
  return room >= 0, value
end

-- Writes a claim's record.
local function record_of(id, mode, record)
  local capacity = string.match(mode, '/(%d+)$')
  if capacity then
    call('HSET', CLAIMS, id, record, '.of', capacity)
  else
    call('HSET', CLAIMS, id, record)
  end
end

-- Grants to a claim that nobody stands in the way of, for `lease` ms. `value`: what the lock's key holds, where that is known.
local function grant(id, mode, token, owner, lease, value)
  if mode == 'x' then
    call('SET', LOCK, id .. '*' .. token .. ' ' .. us .. ' ' .. owner, 'PX', int(lease))
  else
    record_of(id, mode, 'h ' .. mode .. ' ' .. token .. ' ' .. us .. ' ' .. owner)
    call('ZADD', HOLDERS, int(now + lease), id)
    mark(false, value)
  end
end

local function leave(id)
  call('LREM', QUEUE, '1', id)
  call('HDEL', CLAIMS, id)
end

-- Tells the first waiter who hears it that the end that it knows no longer counts: `ms` from now is one.
local function announce(ms)
  for at = 0, PASSES - 1 do
    local id = call('LINDEX', QUEUE, int(at))
    if not id then return end
    local mode, ends, _, _, inbox = waiter(call('HGET', CLAIMS, id))
    if mode and ends > now and inbox ~= '-' and tell(inbox, 'n ' .. id .. ' ' .. int(now) .. ' ' .. int(ms)) then return end
  end
end

-- How many stand ahead of a waiter; who is farther back than 64 does not need to know by how much. And whether it stands
-- in no queue at all, although it has a record.
local function place_of(id)
  local first = call('LRANGE', QUEUE, '0', '63')
  for i = 1, #first do
    if first[i] == id then
      return i - 1, false
    end
  end
  return #first, #first < 64
end

-- Makes the queue anew from the records of its waiters, in the order in which they came: its key was lost.
local function restore()
  local all, waiting, last = call('HGETALL', CLAIMS), {}, now
  for i = 1, #all, 2 do
    local mode, ends, _, since = waiter(all[i + 1])
    if ends and ends > now then
      local capacity = string.match(mode, '/(%d+)$')
      if capacity then
        -- Forgotten, perhaps, with the end of the queue.
        call('HSET', CLAIMS, '.of', capacity)
      end
      waiting[#waiting + 1] = since .. ' ' .. all[i]
      last = math.max(last, ends)
    end
  end
  table.sort(waiting)
  call('DEL', QUEUE)
  for i = 1, #waiting do
    call('RPUSH', QUEUE, string.match(waiting[i], ' (.*)$'))
  end
  if waiting[1] then
    keep(last - now, QUEUE)
  end
end

-- Grants to the waiters that are next in line, as many as there is room for. The asker's grant is the answer of the
-- script, lives for its whole TTL and is returned here; every other one is pushed and lives for the window. A waiter
-- whose inbox nobody listens to keeps its place, and the next one gets the grant. `free`: known to be free. `ids`: the
-- first two of the queue, where they are known. `at`: where to begin.
-- Answers, besides the grant, where to go on if there was too much for one script and nobody could be told to; and whether it
-- came to the end of the queue.
local function settle(asker, free, ids, at)
  local granted, passed, removed, own = 0, 0, 0, nil
  at = at or 0
  while granted < GRANTS and passed < PASSES do
    ids = ids or call('LRANGE', QUEUE, int(at), int(at + 1))
    local id, next_id = ids[1], ids[2]
    ids = nil
    if not id then return own, nil, true end
    local records = call('HMGET', CLAIMS, id, next_id or id)
    local mode, ends, ttl, _, inbox, owner = waiter(records[1])
    if not mode or ends <= now then
      -- Who stands here twice may hold by now what stands under its id, or be buried there.
      call('LREM', QUEUE, '1', id)
      if string.sub(records[1] or '', 1, 2) == 'w ' then
        call('HDEL', CLAIMS, id)
      end
      passed, removed = passed + 1, removed + 1
    elseif not (free or admits(mode)) then
      return own
    elseif id == asker then
      own = next_token()
      leave(id)
      grant(id, mode, own, owner, ttl)
      granted, free = granted + 1, false
    else
      local lease = math.min(ttl, WINDOW_MS)
      local _, _, _, _, next_inbox = waiter(next_id and records[2])
      -- The token is the script's first write: should the server refuse writes, it does so before anybody is told.
      local known, token = pcall(next_token)
      if not known then return own end
      local message = 'g ' .. id .. ' ' .. token .. ' ' .. int(now) .. ' ' .. int(lease)
      if next_inbox == inbox then
        -- Who is next looks again when this grant ends unconfirmed.
        message = message .. ' ' .. next_id
      end
      if tell(inbox, message) then
        leave(id)
        grant(id, mode, token, owner, lease)
        if next_inbox and next_inbox ~= inbox then
          tell(next_inbox, 'n ' .. next_id .. ' ' .. int(now) .. ' ' .. int(lease))
        end
        granted, free = granted + 1, false
        if mode == 'x' then return own end
      else
        at, passed = at + 1, passed + 1
      end
    end
  end
  -- Who is next goes on, by a step of its own. Only after one that has made the queue shorter: it begins where this one did.
  local next_id = call('LINDEX', QUEUE, int(at))
  local mode, _, _, _, inbox = waiter(next_id and call('HGET', CLAIMS, next_id))
  local told = mode and inbox ~= '-' and granted + removed > 0 and tell(inbox, 'n ' .. next_id .. ' ' .. int(now) .. ' 0')
  return own, next_id and not told and at or nil
end

-- The same for whoever does not go on with the rest: those who cannot be told, more than one script passes, go behind the
-- others, so that the next step begins with others.
local function settle_some(asker)
  local own, at = settle(asker)
  if at and at > 0 then
    -- One by one, so that a script that breaks off makes the queue no longer. Behind them stands one more.
    for _ = 1, at do
      call('RPUSH', QUEUE, call('LPOP', QUEUE))
    end
  end
  return own, at
end
