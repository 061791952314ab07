-- The queue of one lock: what the steps share.
--
-- KEYS[1] the lock: the one holder's record ("<claim id> <token> <since µs> <owner>") or, while several hold parts of
--   it or it stays closed, a marker that begins with "clinch ". Its expiry is the lease. Anything else is a foreign
--   client's, which excludes us as we exclude it.
-- KEYS[2] the claims, a hash: claim id -> "w <mode> <place ends, ms> <ttl, ms> <since µs> <inbox> <owner>" of a waiter or
--   "h <mode> <token> <since µs> <owner>" of the holder of a part; "x<claim id>" -> until when a claim that was released
--   in doubt may not come back; ".closed" -> until when nobody of ours is granted; ".run" -> since when the lock was
--   handed over without being free in between.
-- KEYS[3] the queue, a sorted set: waiting claim ids by ticket.
-- KEYS[4] the holders of parts, a sorted set: claim ids by the end of their lease (ms).
-- KEYS[5] the fence: the last token of the hash slot. The only key without an expiry.
-- ARGV[1] "<PUBLISH or SPUBLISH> <1 when its answer counts every receiver> <run> <gap> <prefix of inbox channels>": what
--   does not change from step to step, in one argument, since each costs the server time.
local LOCK, CLAIMS, QUEUE, HOLDERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000)

-- How long a grant that is pushed to a waiter lives unless the waiter renews it (ms): what a dead one costs at most.
local WINDOW = 3000
-- Grants per script, so that a thousand readers let in at once do not block the server.
local GRANTS = 64
-- How much longer than their last claim side keys live (ms).
local SPARE = 60000

local function int(number)
  return string.format('%d', number)
end

local function waiter(record)
  local mode, ends, ttl, since, inbox, owner = string.match(record or '', '^w (%S+) (%d+) (%d+) (%d+) (%S+) (.*)$')
  return mode, tonumber(ends), tonumber(ttl), since, inbox, owner
end

-- Lets the side keys live for this long at least. `key` is the one that may have just come into being.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    for i = 2, 4 do
      redis.call('PEXPIRE', KEYS[i], int(ms + SPARE))
    end
  end
end

local function is_marker(value)
  return value == 'clinch parts' or value == 'clinch closed'
end

-- What stands in the lock's key, as much as is of use; '' only when there is none.
local function lock_value()
  local value = redis.call('GETRANGE', LOCK, 0, 1023)
  return value == '' and redis.call('EXISTS', LOCK) == 1 and ' ' or value
end

-- Until when the lock stays closed although nobody holds it, or nil.
local function closed_until()
  local closed = tonumber(redis.call('HGET', CLAIMS, '.closed') or nil)
  return closed and closed > now and closed or nil
end

-- Forgets the holders of parts whose lease has run out; answers who is left.
local function holders()
  local dead = redis.call('ZRANGEBYSCORE', HOLDERS, '-inf', int(now))
  for i = 1, #dead do
    redis.call('HDEL', CLAIMS, dead[i])
    redis.call('ZREM', HOLDERS, dead[i])
  end
  return redis.call('ZRANGE', HOLDERS, 0, -1)
end

-- Puts the marker of the holders of parts into the lock key, so that foreign clients are shut out until the last lease
-- ends, or takes it away when nobody is left.
local function mark()
  local value = lock_value()
  if value ~= '' and not is_marker(value) then
    return false
  end
  local last = redis.call('ZREVRANGE', HOLDERS, 0, 0, 'WITHSCORES')
  local ends = math.max(tonumber(last[2] or 0), closed_until() or 0)
  if ends == 0 then
    redis.call('DEL', LOCK)
  else
    redis.call('SET', LOCK, last[1] and 'clinch parts' or 'clinch closed')
    redis.call('PEXPIREAT', LOCK, int(ends))
  end
  return true
end

-- Whether a claim of this mode, with nobody ahead of it in the queue, can be granted; and what the lock key holds.
local function admits(mode)
  local value = lock_value()
  if value ~= '' and not is_marker(value) then
    return false, value
  end
  if closed_until() then
    return false, 'clinch closed'
  end
  local ids = holders()
  if #ids == 0 then
    if value ~= '' then
      redis.call('DEL', LOCK)
    end
    return true, ''
  end
  local taken = 0
  for i = 1, #ids do
    local record = redis.call('HGET', CLAIMS, ids[i]) or ''
    local count = string.match(record, '^h p(%d+)/')
    if mode == 's' then
      return string.sub(record, 1, 4) == 'h s ', value
    elseif mode == 'x' or not count then
      return false, value
    end
    taken = taken + tonumber(count)
  end
  local count, capacity = string.match(mode, '^p(%d+)/(%d+)$')
  return taken + tonumber(count) <= tonumber(capacity), value
end

-- Grants to a claim that nobody stands in the way of, for `lease` ms.
local function grant(id, mode, token, owner, lease)
  if mode == 'x' then
    redis.call('SET', LOCK, id .. ' ' .. token .. ' ' .. us .. ' ' .. owner, 'PX', int(lease))
  else
    redis.call('HSET', CLAIMS, id, 'h ' .. mode .. ' ' .. token .. ' ' .. us .. ' ' .. owner)
    redis.call('ZADD', HOLDERS, int(now + lease), id)
    keep(HOLDERS, lease)
    mark()
  end
end

local function leave(id)
  redis.call('ZREM', QUEUE, id)
  redis.call('HDEL', CLAIMS, id)
end

-- Sends a message to an inbox; answers whether somebody may have got it. A waiter without an inbox asks by itself. Who
-- may not publish must be able to release nevertheless.
local function tell(inbox, message)
  if inbox == '-' then
    return true
  end
  local publish, counts, channels = string.match(ARGV[1], '^(%S+) (%d) %d+ %d+ (.*)$')
  local heard = redis.pcall(publish, channels .. inbox, message)
  return type(heard) == 'number' and (heard > 0 or counts ~= '1')
end

-- Grants to the waiters that are next in line, as many as there is room for. The asker's grant is the answer of the
-- script, lives for its whole TTL and is returned here; every other one is pushed and lives for the window. A waiter
-- whose inbox nobody listens to keeps its place, and the next one gets the grant. `free`: known to be free. `ids`: the
-- first two of the queue, where they are known.
local function settle(asker, free, ids)
  local at, granted, own = 0, 0, nil
  while granted < GRANTS do
    ids = ids or redis.call('ZRANGE', QUEUE, at, at + 1)
    local id, next_id = ids[1], ids[2]
    ids = nil
    if not id then break end
    local records = redis.call('HMGET', CLAIMS, id, next_id or id)
    local mode, ends, ttl, _, inbox, owner = waiter(records[1])
    if not mode or ends <= now then
      leave(id)
    elseif not (free or admits(mode)) then
      break
    elseif id == asker then
      own = next_token()
      leave(id)
      grant(id, mode, own, owner, ttl)
      granted, free = granted + 1, false
    else
      local lease = math.min(ttl, WINDOW)
      local _, _, _, _, next_inbox = waiter(next_id and records[2])
      -- The token is the script's first write: should the server refuse writes, it does so before anybody is told.
      local token = next_token()
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
        if mode == 'x' then break end
      else
        at = at + 1
      end
    end
  end
  return own
end
