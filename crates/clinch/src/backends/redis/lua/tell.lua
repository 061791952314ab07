-- Sends a message to an inbox, in the way in which its waiter listens, whatever the sender's own is; answers whether somebody may
-- have got it. A waiter without an inbox asks by itself. Who may not publish must be able to release nevertheless.
local function tell(inbox, message)
  if inbox == '-' then
    return true
  end
  local publish, channels, counts = 'PUBLISH', 'clinch:~{inbox}:', string.match(ARGV[1], ' (%d) %d+ %d+$')
  if string.sub(inbox, 1, 1) == 's' then
    -- A channel of the slot, named as its fence is.
    publish, channels, counts = 'SPUBLISH', string.sub(KEYS[5], 1, -6) .. 'inbox:', '1'
  end
  local heard = redis.pcall(publish, channels .. inbox, message)
  return type(heard) == 'number' and (heard > 0 or counts ~= '1')
end
