-- Renew claims of one lock, held and waiting alike; with a TTL of 0, only read them.
--
-- ARGV[1] begins "place" when it is their places that are renewed: a grant that nobody has taken keeps the end that it has.
-- Otherwise a place is no answer: a late copy of the first step may have put a claim into the queue that was taken away.
-- ARGV[2], [3], ...: claim id and TTL (ms) in turn. Answers for each how long it lives now (ms), -1: it is gone, or
-- -2: without an end, for an operator took it away; a renewal with a TTL gives it one again.
-- A lease never gets shorter: an older request may arrive after one that asked for more.
local answers = {}
-- Who stands in the queue, whether that is all of it, and whether one of these claims should, but does not.
local listed, whole, lost
local place = string.sub(ARGV[1], 1, 6) == 'place '
-- A full server refuses a script whose first write needs memory, and looks at no later one; this one needs none.
call('HDEL', CLAIMS, '')
for i = 2, #ARGV, 2 do
  local id, ttl, left = ARGV[i], tonumber(ARGV[i + 1]), -1
  local record = call('HGET', CLAIMS, id) or ''
  local mode, ends, old, since, inbox, owner = waiter(record)
  if is_of(call('GETRANGE', LOCK, '0', '32'), id) then
    left = call('PTTL', LOCK)
    if not place and ttl > 0 then
      -- Written also where it is long enough: see `renew_held.lua`.
      left = math.max(left, ttl)
      call('PEXPIRE', LOCK, int(left))
    end
    left = left == -1 and -2 or left
  elseif mode and place then
    if ends > now then
      left = math.max(ends - now, ttl)
      call('HSET', CLAIMS, id, 'w ' .. mode .. ' ' .. int(now + left - old) .. ' ' .. int(old) .. ' ' .. since
        .. ' ' .. inbox .. ' ' .. owner)
      keep(left, QUEUE)
      if not listed then
        listed = {}
        local first = call('LRANGE', QUEUE, '0', '63')
        for j = 1, #first do
          listed[first[j]] = true
        end
        whole = #first < 64
      end
      lost = lost or whole and not listed[id]
    end
  elseif string.find(record, '^h %S+ %d') then
    local ends = tonumber(call('ZSCORE', HOLDERS, id) or 0)
    local value = ends > now and lock_value()
    if value and value ~= '' and not is_marker(value) then
      -- Deleted by force, and a foreign client has taken it.
      call('ZREM', HOLDERS, id)
      call('HDEL', CLAIMS, id)
    elseif value then
      left = math.max(ends - now, place and 0 or ttl)
      if not place and ttl > 0 then
        call('ZADD', HOLDERS, int(now + left), id)
        mark()
      end
    end
  end
  answers[#answers + 1] = left
end
if lost then
  restore()
end
-- A holder that died leaves a free lock and nobody who tells the queue: every renewal of a place looks after it.
if call('EXISTS', LOCK) == 0 then
  settle_some(nil)
end
return answers
