-- Whether a write with this fencing token may go through. Keeps the largest token seen beside the data, in `key`, and
-- answers false to every older one. The same token may write again. Call it before the write, in the same script.
local function clinch_fence(key, token)
  token = tonumber(token)
  local seen = tonumber(redis.call('GET', key) or nil)
  if not token or seen and seen > token then
    return false
  end
  if seen ~= token then
    redis.call('SET', key, string.format('%.0f', token))
  end
  return true
end
