-- driver: checks any number of buckets at one instant, and charges all of them or none.
--
-- KEYS    [1] the revision key, when ARGV[3] >= 0; then one key per bucket.
-- ARGV    [1] mode: check, peek, charge, refund, acquire   [2] clock (µs; 0 = the server's TIME)
--         [3] the caller's revision (-1 = none)
--         [4] longest wait that acquire may book (µs); for a refund, when its units were charged (0 = unknown)
--         then nine per bucket: algorithm, limit, period (µs), burst, enforced (1, or 0 = log only; for a refund of a
--         known charge, its units), window start and finish (µs; 0 0 = none), cost (units), and: of a calendar window
--         whether its count is durable (0; 1 = yes, 2 = yes, and "missing" is to be the reply where there is no key);
--         of a concurrent one the id of the slot (0 = none); else for a refund of a known charge, how long after it
--         the bucket was full again (µs).
-- Returns whole numbers as one string, 8 bytes each, big-endian: parsing a list costs the caller more than the call.
--         {1, allowed, now, revision, then five per bucket: passed, remaining, retry after, reset after, next after}
--         (µs; retry after is 0 when passed, -1 when waiting cannot help; for acquire it is the booked wait; next
--         after is when remaining first grows, 0 when the bucket is full; a remaining below 0 is a debt),
--         {2, 0, now, revision}  a newer revision is stored: reload and ask again,
--         {3, 0, now, revision}  now lies outside a caller's window: compute the window from now, and ask again,
--         {4, 0, now, revision}  a durable count is missing: restore it, and ask again.
-- Never   writes before every argument is read and every bucket is checked. A refusal writes nothing, nor does a cost
--         of 0, except to move a bucket's time back to now (b.rewound; see prelude). A key whose count is 0 is deleted,
--         unless the count is durable. No value that a key may hold makes the script fail.

local HEADER, STRIDE = 4, 9
local MAX_US, DAY_US = 9007199254740991, 86400000000
-- Ten years: a debt may take longer to drain, but no key needs to live longer.
local MAX_TTL_MS = 315619200000
local KEYS, ARGV, call = KEYS, ARGV, redis.call

-- Because this is slow, the usual values are compared as text first.
local function number(i, least)
  local n = tonumber(ARGV[i])
  if n and n >= least and n <= MAX_US and n % 1 == 0 then
    return n
  end
  error('ratequota: ARGV[' .. i .. '] must be a whole number from ' .. least .. ' to 2^53, not ' .. tostring(ARGV[i]))
end

local function packed(numbers)
  return struct.pack('>' .. string.rep('i8', #numbers), unpack(numbers))
end

local mode = ARGV[1]
if mode ~= 'check' and mode ~= 'peek' and mode ~= 'charge' and mode ~= 'refund' and mode ~= 'acquire' then
  error('ratequota: unknown mode ' .. tostring(mode))
end
local now = ARGV[2] == '0' and 0 or number(2, 0)
local revision = ARGV[3] == '-1' and -1 or number(3, -1)
local patience = ARGV[4] == '0' and 0 or number(4, 0)
local first = revision >= 0 and 1 or 0
local count = #KEYS - first
if #ARGV ~= HEADER + STRIDE * count then
  error('ratequota: ' .. count .. ' buckets need ' .. HEADER + STRIDE * count .. ' arguments, not ' .. #ARGV)
end

-- Under a simulated clock keys still expire by the server's, so each write must renew the TTL.
local by_server = now == 0
if by_server then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local values = #KEYS > 0 and call('MGET', unpack(KEYS)) or {}
local stored = revision
if first == 1 and values[1] ~= ARGV[3] then
  -- Publications store whole numbers up to the server's time only; the day allows for a clock that was set back.
  local time = call('TIME')
  local latest = time[1] * 1000000 + time[2] + DAY_US
  -- Only a peek leaves a store without a revision as it is.
  stored = tonumber(values[1] or revision == 0 and mode == 'peek' and '0' or '') or -1
  if stored % 1 ~= 0 or stored > latest then
    stored = -1
  end
  if revision > latest then
    revision = 0
  end
  if stored > revision then
    return packed({2, 0, now, stored})
  end
end

-- Room for three buckets from the start.
local reply = {1, 1, now, revision, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil}
local known = mode == 'refund' and patience > 0
local outside, missing, name, check, settle = false, false, nil, nil, nil
for i = 1, count do
  local at = HEADER + STRIDE * (i - 1)
  if ARGV[at + 1] ~= name then
    name = ARGV[at + 1]
    check, settle = algorithm(name)
    if not check then
      error('ratequota: unknown algorithm ' .. tostring(name))
    end
  end
  local limit, start, finish = number(at + 2, 1), 0, 0
  local burst = ARGV[at + 4] == ARGV[at + 2] and limit or number(at + 4, 1)
  local enforced = ARGV[at + 5] == '1' or number(at + 5, 0) == 1
  if ARGV[at + 6] ~= '0' or ARGV[at + 7] ~= '0' then
    start, finish = number(at + 6, 0), number(at + 7, 0)
    -- A refund names the window of its charge.
    outside = outside or finish > 0 and not known and (now < start or now >= finish)
  end
  local period = number(at + 3, 1)
  -- With two more fields by the algorithm the table reaches its final size.
  local b = {settle = settle, limit = limit, period = period, burst = burst, start = start, finish = finish}
  local cost = ARGV[at + 8] == '1' and 1 or number(at + 8, 0)
  local past = ARGV[at + 9] == '0' and 0 or number(at + 9, 0)
  if finish > 0 then
    b.durable = past > 0
    missing = missing or past > 1 and not values[first + i]
  elseif known then
    b.since, b.level, b.units = patience, past, number(at + 5, 0)
  elseif past > 0 then
    b.id = past
  end
  if mode == 'refund' and cost > 0 then
    b.refunding = true
  end
  local passed, retry_at = check(b, values[first + i], now, cost, KEYS[first + i])
  if mode == 'acquire' then
    passed = passed or retry_at and retry_at - now <= patience
  elseif mode == 'charge' or mode == 'refund' then
    passed, retry_at = true, nil
  end
  if not passed and enforced then
    reply[2] = 0
  end
  values[first + i] = b
  reply[5 * i] = passed and 1 or 0
  local wait = passed and 0 or -1
  if retry_at then
    wait = retry_at - now
    wait = wait > 0 and (wait < MAX_US and wait or MAX_US) or 0
  end
  reply[5 * i + 2] = wait
end
if stored < revision then
  -- The revision was lost or overwritten, perhaps before any process read it: publish again.
  stored = revision < now and now or revision + 1
  call('SET', KEYS[1], stored)
  return packed({2, 0, now, stored})
elseif outside then
  return packed({3, 0, now, revision})
elseif missing then
  return packed({4, 0, now, revision})
end

local charging = reply[2] == 1 and mode ~= 'peek'
for i = 1, count do
  local b, units = values[first + i], nil
  if charging and reply[5 * i] == 1 then
    local cost = tonumber(ARGV[HEADER + STRIDE * (i - 1) + 8])
    units = cost > 0 and (b.refunding and -cost or cost) or nil
  end
  local rewound = b.rewound
  if rewound and mode ~= 'peek' then
    units = units or 0 -- also where nothing is charged: else each refusal would begin the wait again
  end
  local remaining, full_at, more_at, value, finish, same_finish = b.settle(b, units, now)
  if units and full_at == 0 and not b.durable then
    call('DEL', KEYS[first + i])
  elseif units and same_finish and by_server and not rewound then
    call('SET', KEYS[first + i], value, 'KEEPTTL')
  elseif units then
    -- ms, rounded up, plus a second for differences from the clock by which the server expires keys.
    local ttl = (finish - now) / 1000
    if ttl < MAX_TTL_MS then
      ttl = ttl > 0 and ttl + -ttl % 1 + 1000 or 1000
    else
      ttl = MAX_TTL_MS
    end
    if value then
      call('SET', KEYS[first + i], value, 'PX', ttl)
    else
      call('PEXPIRE', KEYS[first + i], ttl)
    end
  end
  local reset, more = full_at - now, more_at - now
  reset = reset > 0 and (reset < MAX_US and reset or MAX_US) or 0
  if remaining > 0 then
    reply[5 * i + 1] = remaining < MAX_US and remaining or MAX_US
  else
    -- A debt, rounded up; NaN compares as false.
    reply[5 * i + 1] = remaining < 0 and (remaining > -MAX_US and remaining - remaining % 1 or -MAX_US) or 0
  end
  reply[5 * i + 3] = reset
  -- For a full bucket, and beyond 2^53, more_at may be any number, or NaN.
  reply[5 * i + 4] = more > 0 and more < reset and more or reset
end
return packed(reply)
