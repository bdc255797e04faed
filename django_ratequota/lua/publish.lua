#!lua
-- publish: gives the policies a new revision, greater than any before, even after the server lost its data.
--
-- KEYS    [1] the revision key.
-- Stores  max(stored + 1, server time in µs) there, without a TTL.
-- Returns the new revision.

local time = redis.call('TIME')
local revision = math.max((tonumber(redis.call('GET', KEYS[1]) or '') or 0) + 1, time[1] * 1000000 + time[2])
redis.call('SET', KEYS[1], string.format('%.0f', revision))
return revision
