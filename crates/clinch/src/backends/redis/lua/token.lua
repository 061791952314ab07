-- The server's time, and tokens. Prepended to every script that grants or queues.
local call = redis.call
local clock = call('TIME')
local us = clock[1] .. (#clock[2] == 6 and clock[2] or string.sub('00000' .. clock[2], -6))

-- A token larger than all before in this slot: the server's time in µs, or the last token and one where the clock went
-- back. Both have 16 digits, so they compare as text.
local function next_token()
  local last = call('GETSET', KEYS[5], us)
  if not last or #last ~= 16 or last < us then
    return us
  end
  -- 2^53: no token, and nothing that this script has written.
  if last >= '9007199254740992' then
    call('SET', KEYS[5], last)
    error('the last token of this hash slot is none; look at the key ' .. KEYS[5])
  end
  local token = string.format('%d', tonumber(last) + 1)
  call('SET', KEYS[5], token)
  return token
end
