-- What a lock's key says of a claim: 1, it is the one holder, -1, it was, until somebody evicted it, or 0. An error instead where the
-- server has no answer.
local function standing(key, id)
  -- A key that holds no text is not the claim's, and must not end the answers for the other locks.
  local holder = redis.pcall('GETRANGE', key, '0', '32')
  if type(holder) == 'table' then
    return string.find(holder.err, 'WRONGTYPE', 1, true) and 0 or holder
  end
  return (holder == id .. ' ' or holder == id .. '*') and 1 or holder == id .. '!' and -1 or 0
end
