#!lua
-- scan: a step of SCAN on the server that holds a key: on a Cluster, SCAN itself names none.
--
-- KEYS    [1] a key of that server; it need not exist.
-- ARGV    [1] the cursor ("0" = begin)   [2] the pattern of the keys   [3] about how many to look at
-- Returns {the next cursor ("0" = this was the last step), {key ...}}. Writes nothing.

return redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
