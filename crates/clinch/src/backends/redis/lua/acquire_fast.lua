-- The way of an uncontended exclusive claim, ahead of everything else: no claims key means that nobody queues and
-- nobody holds a part, and SET NX finds the lock free for foreign clients too.
if ARGV[6] == 'x' and redis.call('EXISTS', KEYS[2]) == 0 then
  local token = next_token()
  if redis.call('SET', KEYS[1], ARGV[4] .. ' ' .. token .. ' ' .. us .. ' ' .. ARGV[9], 'NX', 'PX', ARGV[5]) then
    return { 1, token }
  end
end
