-- Read whether exclusive locks are held: KEYS[i] by claim ARGV[i]. Answers 1 or 0 for each. Writes nothing, so that whoever has had
-- their keys noted for client tracking is told of the next change of each.
local answers = {}
for i = 1, #KEYS do
  -- A key that holds no text is not the claim's.
  local holder, id = redis.pcall('GETRANGE', KEYS[i], '0', '32'), ARGV[i]
  if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE', 1, true) then
    return holder
  end
  answers[i] = (holder == id .. ' ' or holder == id .. '*') and 1 or 0
end
return answers
