#!lua
-- report: stores a process's report on itself, and removes processes that no longer report.
--
-- KEYS    [1] the list of processes, [2] this process's report.
-- ARGV    [1] the process's name   [2] its report (JSON)   [3] TTL (s)
-- Stores  the name in a sorted set by the time of its last report (s), and the report; both with that TTL.
-- Returns the number of processes that have reported in that time.

local seconds = tonumber(ARGV[3])
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - seconds)
redis.call('EXPIRE', KEYS[1], seconds)
redis.call('SET', KEYS[2], ARGV[2], 'EX', seconds)
return redis.call('ZCARD', KEYS[1])
