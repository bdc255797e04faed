#!lua
-- collect: adds a process's counts to the statistics of one hour; what is stored is bounded.
--
-- KEYS    [1] counts by the minute   [2] counts by the quarter of an hour   [3] [4] [5] callers admitted, refused, and
--         refused in log mode   [6] recorded usage   [7] its level and size   [8] refusals   [9] refusals by time
--         [10] refusals of a network that had others in the same minute before, by time
--         [11] would-be refusals   [12] would-be refusals by time
-- ARGV    [1] JSON: minutes, quarters {field, n ...}; callers {{member, n ...} x 3}; refusals and would_be {{id, time,
--         n, text, 1 = others of its network or policies came before} ...}
--         [2] a chunk of usage ("" = none)           [3] the level at which to begin the hour
--         [4] most fields of counts   [5] most callers   [6] most bytes of usage   [7] most refusals
--         [8] [9] TTL of minutes, of all else (s)    [10] the time of the oldest refusals to keep (s)
--         [11] most would-be refusals
-- Stores  hashes, sorted sets by count, a list of chunks, and for refusals a hash and a sorted set by time.
-- Returns the hour's level: usage is kept for one caller in 2^level. It rises by one each time the room left is
--         halved, so that some always is.

local payload = cjson.decode(ARGV[1])
local chunk = ARGV[2]
local floor, most_fields, most_callers, most_bytes, most_refusals, short_ttl, long_ttl, oldest =
  tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]),
  tonumber(ARGV[9]), tonumber(ARGV[10])

local function add_counts(key, counts, ttl)
  local size = redis.call('HLEN', key)
  for i = 1, #counts, 2 do
    local field = counts[i]
    -- Beyond the bound, only the fields that are there keep counting, and all requests together: else an hour's
    -- chart would end where its key is full.
    if size < most_fields or string.find(field, ':t:', 1, true) or redis.call('HEXISTS', key, field) == 1 then
      if redis.call('HINCRBY', key, field, counts[i + 1]) == counts[i + 1] then
        size = size + 1
      end
    end
  end
  if #counts > 0 then
    redis.call('EXPIRE', key, ttl)
  end
end

add_counts(KEYS[1], payload.minutes, short_ttl)
add_counts(KEYS[2], payload.quarters, long_ttl)

for outcome = 1, 3 do
  local key, callers = KEYS[2 + outcome], payload.callers[outcome]
  for i = 1, #callers, 2 do
    redis.call('ZINCRBY', key, callers[i + 1], callers[i])
  end
  if #callers > 0 then
    if redis.call('ZCARD', key) > 2 * most_callers then
      redis.call('ZREMRANGEBYRANK', key, 0, -most_callers - 1)
    end
    redis.call('EXPIRE', key, long_ttl)
  end
end

local kept = redis.call('HMGET', KEYS[7], 'level', 'floor', 'bytes')
local level, bytes = tonumber(kept[1] or '') or floor, tonumber(kept[3] or '') or 0
floor = tonumber(kept[2] or '') or floor
if chunk ~= '' then
  if bytes + #chunk <= most_bytes then
    redis.call('RPUSH', KEYS[6], chunk)
    redis.call('EXPIRE', KEYS[6], long_ttl)
    bytes = bytes + #chunk
  else
    level = level + 1
  end
  while level < 63 and bytes > most_bytes * (1 - 0.5 ^ (level - floor + 1)) do
    level = level + 1
  end
  redis.call('HSET', KEYS[7], 'level', level, 'floor', floor, 'bytes', bytes)
  redis.call('EXPIRE', KEYS[7], long_ttl)
end

-- A family of refusals: what is kept of them, their times, and the times of those that are dropped first.
local function keep_refusals(refusals, kept, times, first, most)
  for _, refusal in ipairs(refusals) do
    local id, at, count, text, later = unpack(refusal)
    redis.call('HSETNX', kept, id, text)
    redis.call('HINCRBY', kept, id .. ':count', count)
    redis.call('ZADD', times, 'NX', at, id)
    if later == 1 then
      redis.call('ZADD', first, 'NX', at, id)
    end
  end
  if #refusals > 0 then
    for _, key in ipairs({ kept, times, first }) do
      redis.call('EXPIRE', key, long_ttl)
    end
  end
  local function drop(ids)
    for _, id in ipairs(ids) do
      redis.call('ZREM', times, id)
      redis.call('ZREM', first, id)
      redis.call('HDEL', kept, id, id .. ':count')
    end
  end
  drop(redis.call('ZRANGEBYSCORE', times, '-inf', oldest))
  for _, key in ipairs({ first, times }) do
    local excess = redis.call('ZCARD', times) - most
    if excess > 0 then
      drop(redis.call('ZRANGE', key, 0, excess - 1))
    end
  end
end

-- Drop first the refusals of a network that had others in the same minute, so that no network takes all the room.
keep_refusals(payload.refusals, KEYS[8], KEYS[9], KEYS[10], most_refusals)
-- Kept apart, so that they never displace refusals.
keep_refusals(payload.would_be, KEYS[11], KEYS[12], KEYS[12], tonumber(ARGV[11]))
return level
