-- The server's time, and tokens. Prepended to every script that grants or queues.
local call = redis.call
local clock = call('TIME')
-- 16 digits, so that it compares as text, also where nobody has set the clock.
local us = (#clock[1] > 9 and clock[1] or string.sub('000000000' .. clock[1], -10))
  .. (#clock[2] == 6 and clock[2] or string.sub('00000' .. clock[2], -6))

-- A token larger than all before in this slot: the server's time in µs, or the last token and one where the clock went
-- back.
local function next_token()
  -- From the year 2255 on the time is no token, and what was once given binds for ever.
  if us >= '9007199254740992' or #us > 16 then
    error('the clock of this server is beyond the year 2255')
  end
  -- Once it is set all leases would be over at once.
  if us < '1000000000000000' then
    error('the clock of this server is not set: it reads a time before the year 2001')
  end
  local last = call('GETSET', KEYS[5], us)
  if not last or #last ~= 16 or last < us then
    return us
  end
  -- 2^53: no token, and nothing that this script has written. A smaller one could be smaller than one that was given.
  if last >= '9007199254740992' then
    call('SET', KEYS[5], last)
    error('no token follows what stands in the fence: set ' .. KEYS[5] .. ' to the last token that was given, or delete it if the'
      .. ' clock of this server was never ahead')
  end
  local token = string.format('%d', tonumber(last) + 1)
  call('SET', KEYS[5], token)
  return token
end
