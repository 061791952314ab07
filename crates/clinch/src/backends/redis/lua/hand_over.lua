-- The way of an exclusive lock to the next in line, ahead of everything else: if that claim wants all of it, can be told,
-- and has come so lately that those behind it still have their first look before them, by which they find it dead.
local simple = string.find(ARGV[1], '^0 0 0 %d 0 ')
-- The first write: one that needs no memory, so that a full server does not refuse the script.
local id = mine and simple and call('LPOP', KEYS[3])
if id then
  local record = call('HMGET', KEYS[2], id, '.foreign')
  -- Where others poll the lock has to be left free from time to time.
  local plain = not record[2] and record[1] or ''
  local from, ttl, since, inbox, owner = string.match(plain, '^w x (%d+) (%d+) (%d+) (s?%x+) (.*)$')
  local now = string.sub(us, 1, 13)
  if from and tonumber(us) - tonumber(since) < WINDOW_MS * 1000 and tonumber(from) + tonumber(ttl) > tonumber(now) then
    local lease = tonumber(ttl) < WINDOW_MS and ttl or 'WINDOW_MS'
    local known, token = pcall(next_token)
    if known and tell(inbox, 'g ' .. id .. ' ' .. token .. ' ' .. now .. ' ' .. lease) then
      call('HDEL', KEYS[2], id)
      call('SET', KEYS[1], id .. '*' .. token .. ' ' .. us .. ' ' .. owner, 'PX', lease)
      return 1
    end
  end
  -- Back to its place, unless its record is lost.
  local left = record[1] and call('PTTL', KEYS[2])
  if left and call('LPUSH', KEYS[3], id) == 1 and left > 0 then
    -- The only one, so that the key is new.
    call('PEXPIRE', KEYS[3], left)
  end
elseif mine and simple and call('EXISTS', KEYS[2]) == 0 then
  return call('DEL', KEYS[1])
end
