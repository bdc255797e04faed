-- driver: judges any number of buckets at one instant, and charges all of them or none.
--
-- KEYS    [1] the revision key, when ARGV[3] >= 0; then one key a bucket.
-- ARGV    [1] mode: check, peek, charge, refund, acquire   [2] clock (µs; 0 = the server's TIME)
--         [3] the caller's revision (-1 = none)            [4] cost (units)
--         [5] longest wait that acquire may book (µs)
--         then seven a bucket: algorithm, limit, period (µs), burst, enforced (1, or 0 = log only),
--         window start and finish (µs; 0 0 = none).
-- Returns {1, allowed, now, revision, then four a bucket: passed, remaining, retry after, reset after}
--         (µs; retry after is 0 when passed, -1 when waiting cannot help; for acquire it is the booked wait),
--         {2, 0, now, revision}  a newer revision is stored: reload and ask again,
--         {3, 0, now, revision}  now lies outside a caller's window: compute it anew from now.
-- Never   writes before every argument is read and every bucket is judged; a refusal writes nothing.

local HEADER, STRIDE = 5, 7
local MODES = {check = true, peek = true, charge = true, refund = true, acquire = true}
local MAX_US = 9007199254740991

local function number(i, least)
  local n = tonumber(ARGV[i])
  if not n or n < least or n > MAX_US or n ~= math.floor(n) then
    error('ratequota: ARGV[' .. i .. '] must be a whole number from ' .. least .. ' to 2^53, not ' .. tostring(ARGV[i]))
  end
  return n
end

local mode = ARGV[1]
if not MODES[mode] then
  error('ratequota: unknown mode ' .. tostring(mode))
end
now = number(2, 0)
local revision, cost, patience = number(3, -1), number(4, 0), number(5, 0)
local first = revision >= 0 and 1 or 0
local count = #KEYS - first
if #ARGV ~= HEADER + STRIDE * count then
  error('ratequota: ' .. count .. ' buckets need ' .. HEADER + STRIDE * count .. ' arguments, not ' .. #ARGV)
end
local buckets = {}
for i = 1, count do
  local at = HEADER + STRIDE * (i - 1)
  local algorithm = algorithms[ARGV[at + 1]]
  if not algorithm then
    error('ratequota: unknown algorithm ' .. tostring(ARGV[at + 1]))
  end
  buckets[i] = {
    key = KEYS[first + i], algorithm = algorithm, limit = number(at + 2, 1), period = number(at + 3, 1),
    burst = number(at + 4, 1), enforced = number(at + 5, 0) == 1, start = number(at + 6, 0), finish = number(at + 7, 0),
  }
end

if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local values = #KEYS > 0 and redis.call('MGET', unpack(KEYS)) or {}
if first == 1 then
  local stored = tonumber(values[1] or '') or 0
  if stored < revision then
    -- The server lost data, maybe a publication that nobody has read yet: publish anew, so that all look.
    stored = math.max(revision + 1, now)
    redis.call('SET', KEYS[1], string.format('%.0f', stored))
  end
  if stored > revision then
    return {2, 0, now, stored}
  end
end
for _, b in ipairs(buckets) do
  if b.finish > 0 and (now < b.start or now >= b.finish) then
    return {3, 0, now, revision}
  end
end

local allowed = true
for i, b in ipairs(buckets) do
  b.value = values[first + i]
  b.passed, b.retry_at, b.remaining, b.full_at = b.algorithm.check(b, now, cost)
  if mode == 'acquire' and b.retry_at ~= NEVER and b.retry_at - now <= patience then
    b.passed, b.retry_at = true, math.max(now, b.retry_at)
  elseif mode == 'charge' or mode == 'refund' then
    b.passed = true
  end
  allowed = allowed and (b.passed or not b.enforced)
end

if allowed and mode ~= 'peek' then
  local units = mode == 'refund' and -cost or cost
  for _, b in ipairs(buckets) do
    if b.passed then
      b.remaining, b.full_at = b.algorithm.commit(b, units)
    end
  end
end

local reply = {1, allowed and 1 or 0, now, revision}
for _, b in ipairs(buckets) do
  local wait = 0
  if not b.passed and b.retry_at == NEVER then
    wait = NEVER
  elseif not b.passed or mode == 'acquire' then
    wait = math.min(math.max(0, b.retry_at - now), MAX_US)
  end
  reply[#reply + 1] = b.passed and 1 or 0
  reply[#reply + 1] = b.remaining
  reply[#reply + 1] = wait
  reply[#reply + 1] = math.min(math.max(0, b.full_at - now), MAX_US)
end
return reply
