#!lua
-- publish: stores a new revision of the policies, greater than any before, even after the server lost its data.
--
-- KEYS    [1] the revision key
-- Stores  max(stored + 1, server time in µs) there, without a TTL. A stored value that no publication can have
--         written counts as none: no whole number, or one more than a day ahead of the server's time.
-- Returns the new revision.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
-- GET fails on a list; MGET reads it as missing.
local stored = tonumber(redis.call('MGET', KEYS[1])[1] or '')
if not stored or stored % 1 ~= 0 or stored > now + 86400000000 then
  stored = 0
end
local revision = math.max(stored + 1, now)
redis.call('SET', KEYS[1], string.format('%.0f', revision))
return revision
