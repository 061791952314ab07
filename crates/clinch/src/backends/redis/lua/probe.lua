-- Which of the commands that the other scripts use are forbidden to this user? Runs each on a key that is nobody's
-- (KEYS[1]), one that changes nothing on a key that could be a lock's (KEYS[2]), and channel ARGV[1]; answers the names of those that the server refused for lack of permission.
local denied = {}
local function try(name, ...)
  local answer = redis.pcall(name, ...)
  local why = type(answer) == 'table' and answer.err or ''
  -- Redis 7.2 and later say NOPERM; earlier ones "The user executing the script can't run this command".
  if (string.find(why, 'NOPERM') or string.find(why, 'permission') or string.find(why, "can't")) and not denied[name] then
    denied[name] = true
    denied[#denied + 1] = name
  end
end
local key = KEYS[1]
try('TIME')
try('EXISTS', key)
try('SET', key, '', 'PX', '1')
try('GETSET', key, '')
try('GETRANGE', key, 0, 1)
try('SETRANGE', key, 0, '')
try('PTTL', key)
try('PEXPIRE', key, 1)
try('DEL', key)
try('HGET', key, 'f')
try('HMGET', key, 'f')
try('HGETALL', key)
try('HLEN', key)
try('HSCAN', key, 0)
try('HDEL', key, 'f')
try('HSET', key, 'f', '')
try('HSETNX', key, 'f', '')
try('DEL', key)
try('RPUSH', key, 'm')
try('LPUSH', key, 'm')
try('LRANGE', key, 0, 0)
try('LLEN', key)
try('LINDEX', key, 0)
try('LREM', key, 1, 'm')
try('LPOP', key)
try('DEL', key)
try('ZADD', key, 1, 'm')
try('ZCARD', key)
try('ZSCORE', key, 'm')
try('ZRANGE', key, 0, 0)
try('ZREVRANGE', key, 0, 0)
try('ZRANGEBYSCORE', key, 1, 1)
try('ZREM', key, 'm')
try('DEL', key)
try(ARGV[2], ARGV[1], '')
try('SETRANGE', KEYS[2], 0, '')
return denied
