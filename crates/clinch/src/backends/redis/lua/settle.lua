-- Grant what a release has left to be granted, for the queue was too long for one script. ARGV[1] begins "<where to begin>".
-- Answers where to go on, or -1.
local _, at = settle(nil, false, nil, tonumber(string.match(ARGV[1], '^%d+')))
return at or -1
