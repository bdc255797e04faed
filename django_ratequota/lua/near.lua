#!lua
-- near: keeps the subjects that have used half of a rate or more in one window; what is stored is bounded.
--
-- KEYS    [1] windows by their end   [2] the window's subjects by percent   [3] policy -> number of its subjects in [2]
-- ARGV    [1] the window's name   [2] its end, Unix time (s)   [3] seconds until then   [4] most subjects
--         [5] most subjects of one policy; from 80 % on twice, at 100 % three times as many, so that a policy with
--         many subjects has room for the fullest
--         then pairs: a subject (JSON, its policy's id first), percent used; below 50 = remove it
-- Stores  two sorted sets and a hash, which expire with the window.
-- Returns how many subjects have used 50, 80 and 100 % or more.

local name = ARGV[1]
local finish, seconds, most, most_of_policy = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

local function count(member, by)
  local policy = string.match(member, '%d+')
  if redis.call('HINCRBY', KEYS[3], policy, by) <= 0 then
    redis.call('HDEL', KEYS[3], policy)
  end
end

local function remove(member)
  if redis.call('ZREM', KEYS[2], member) == 1 then
    count(member, -1)
  end
end

for at = 6, #ARGV, 2 do
  local member, percent = ARGV[at], tonumber(ARGV[at + 1])
  local room = most_of_policy * (percent >= 100 and 3 or percent >= 80 and 2 or 1)
  if percent < 50 then
    remove(member)
  elseif (tonumber(redis.call('HMGET', KEYS[3], string.match(member, '%d+'))[1] or '') or 0) >= room then
    redis.call('ZADD', KEYS[2], 'XX', percent, member)
  elseif redis.call('ZADD', KEYS[2], percent, member) == 1 then
    count(member, 1)
  end
end

if #ARGV > 5 then
  local excess = redis.call('ZCARD', KEYS[2]) - most
  if excess > 0 then
    for _, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, excess - 1)) do
      remove(member)
    end
  end
  redis.call('ZADD', KEYS[1], 'GT', finish, name)
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', finish - seconds)
  for key = 1, 3 do
    redis.call('EXPIRE', KEYS[key], seconds, 'NX')
    redis.call('EXPIRE', KEYS[key], seconds, 'GT')
  end
end

local counts = {}
for at, level in ipairs({ 50, 80, 100 }) do
  counts[at] = redis.call('ZCOUNT', KEYS[2], level, '+inf')
end
return counts
