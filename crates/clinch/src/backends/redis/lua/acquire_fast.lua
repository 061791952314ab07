-- The way of an uncontended exclusive claim, ahead of everything else: no claims key means that nobody queues and
-- nobody holds a part, and SET NX finds the lock free for foreign clients too.
if string.sub(ARGV[4], 1, 2) == 'x ' and redis.call('EXISTS', KEYS[2]) == 0 then
  local token = next_token()
  if redis.call('SET', KEYS[1], ARGV[2] .. ' ' .. token .. ' ' .. us .. ' ' .. ARGV[5], 'NX', 'PX', ARGV[3]) then
    return token
  end
end
