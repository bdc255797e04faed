#!lua
-- purge: a step of SCAN on the server that the script is sent to, which deletes the keys that the step finds.
--
-- KEYS    none: the script finds them, and on a Cluster they are of many slots (flags=allow-cross-slot-keys).
-- ARGV    [1] the cursor ("0" = begin)   [2] the pattern of the keys   [3] about how many to look at
-- Returns {the next cursor ("0" = this was the last step), how many keys were deleted}. It runs on a full server too
--         (flags=allow-oom). One UNLINK a key, because keys of one command must share a slot.

local step = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local deleted = 0
for _, key in ipairs(step[2]) do
  deleted = deleted + redis.call('UNLINK', key)
end
return {step[1], deleted}
