-- sliding_window_log: the admitted requests of the last period, each with its time; exact.
--
-- Stores  one list of pairs: time (µs), running total of units up to and with that request. A pair takes at most
--         16 bytes until the total passes 2^31, whatever the cost. The newest expired pair stays in front: its
--         total is the base from which the pairs behind it are counted.
-- Admits  when the units of requests newer than now - period, plus cost, are at most the limit.
-- Refund  takes from the request charged, which is counted until b.since + b.level, and rewrites those behind it. It
--         looks at the newest MOST_BEHIND requests only: the units of an older one stay until they expire. Without
--         b.level, takes the newest requests' units.
-- Never   reads the whole list: bounds are found by bisection. Never trims on a read.
--         A key that holds no list counts as an empty one, and an item that is no number as 0.

-- Rewriting 1,000 requests takes the server about a millisecond, and 10^6 two seconds.
local MOST_BEHIND = 1000

local function pair_time(b, i)
  return tonumber(redis.call('LINDEX', b.key, 2 * i)) or 0
end

local function pair_total(b, i)
  return tonumber(redis.call('LINDEX', b.key, 2 * i + 1)) or 0
end

-- The first pair in [low, b.pairs) whose time or total (figure) is at least bound; b.pairs when there is none.
local function bisect(b, figure, low, bound)
  local high = b.pairs
  while low < high do
    local middle = (low + high) / 2
    middle = middle - middle % 1
    if figure(b, middle) < bound then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

-- How many pairs have expired at the edge (µs), the total of the last of them, and the time of the first that has not.
-- The newest pair has not.
local function expired_at(b, edge)
  local front = redis.call('LRANGE', b.key, 0, 3)
  -- Usually none has, or only the one that was left in front.
  local oldest, second = tonumber(front[1]) or 0, tonumber(front[3]) or 0
  if oldest > edge then
    return 0, 0, oldest
  elseif second > edge then
    return 1, tonumber(front[2]) or 0, second
  end
  local expired = bisect(b, pair_time, 2, edge + 1)
  return expired, pair_total(b, expired - 1), pair_time(b, expired)
end

local function check(b, _, now, cost, key)
  local length = redis.pcall('LLEN', key)
  if type(length) == 'table' then
    if not string.find(length.err, '^WRONGTYPE') then
      error(length)
    end
    length = 0
  end
  local at, newest, expired, base, total, oldest = now, 0, 0, 0, 0, nil
  b.key, b.pairs = key, (length - length % 2) / 2
  if b.pairs > 0 then
    local last = redis.call('LRANGE', key, 2 * b.pairs - 2, 2 * b.pairs - 1)
    newest, total = tonumber(last[1]) or 0, tonumber(last[2]) or 0
    at = newest > now and newest or now
    if newest > at - b.period then
      expired, base, oldest = expired_at(b, at - b.period)
    else
      expired, total = b.pairs, 0
    end
    if newest - now > b.period and newest - now > FAR_US then
      b.rewound, at, newest, oldest = true, now, now, now
    end
  end
  b.at, b.newest, b.oldest, b.expired, b.base, b.total = at, newest, oldest, expired, base, total
  local excess = total - base + cost - b.limit
  if excess <= 0 then
    return true
  elseif cost > b.limit then
    return false
  end
  return false, (b.rewound and now or pair_time(b, bisect(b, pair_total, expired, base + excess))) + b.period
end

local function add(b, units)
  if b.total == b.base then
    redis.call('DEL', b.key)
    b.base, b.total, b.oldest, b.expired, b.pairs = 0, 0, b.at, 0, 0
  elseif b.expired > 1 then
    redis.call('LTRIM', b.key, 2 * (b.expired - 1), -1)
    b.expired, b.pairs = 1, b.pairs - b.expired + 1
  end
  b.total, b.newest, b.pairs = b.total + units, b.at, b.pairs + 1
  redis.call('RPUSH', b.key, b.newest, b.total)
end

-- Takes the units from the requests of one time, whichever of them it was.
local function take_from(b, time, units)
  if time <= b.at - b.period then
    return
  end
  local first = bisect(b, pair_time, math.max(b.expired, b.pairs - MOST_BEHIND), time)
  if pair_time(b, first) ~= time then
    return
  end
  local tail, kept = redis.call('LRANGE', b.key, 2 * first, -1), {}
  local before = first > b.expired and pair_total(b, first - 1) or b.base
  local total, newest = before, first > b.expired and pair_time(b, first - 1) or b.newest
  for i = 1, #tail, 2 do
    local at, upto = tonumber(tail[i]) or 0, tonumber(tail[i + 1]) or 0
    local held = upto - before
    before = upto
    if at == time then
      local taken = math.min(held, units)
      held, units = held - taken, units - taken
    end
    if held > 0 then
      total, newest = total + held, at
      kept[#kept + 1], kept[#kept + 2] = tail[i], total
    end
  end
  if first == 0 then
    redis.call('DEL', b.key)
  else
    redis.call('LTRIM', b.key, 0, 2 * first - 1)
  end
  -- In calls of 1000 arguments: the server's Lua takes no unlimited number.
  for i = 1, #kept, 1000 do
    redis.call('RPUSH', b.key, unpack(kept, i, math.min(i + 999, #kept)))
  end
  b.total, b.newest, b.pairs, b.oldest = total, newest, first + #kept / 2, nil
end

local function give_back(b, units)
  b.total = math.max(b.base, b.total - units)
  if b.total == b.base then
    return
  end
  local last = bisect(b, pair_total, b.expired, b.total)
  redis.call('LTRIM', b.key, 0, 2 * last + 1)
  redis.call('LSET', b.key, -1, b.total)
  b.newest, b.pairs = pair_time(b, last), last + 1
end

-- What is counted becomes one request of now.
local function join(b)
  redis.call('DEL', b.key)
  b.total, b.base, b.expired, b.pairs, b.rewound = b.total - b.base, 0, 0, 1, nil
  redis.call('RPUSH', b.key, b.newest, b.total)
end

local function settle(b, units)
  if units and b.rewound then
    join(b)
  end
  if units and units > 0 then
    add(b, units)
  elseif units and units < 0 and b.total > b.base then
    if b.level then
      take_from(b, b.since + b.level - b.period, -units)
    else
      give_back(b, -units)
    end
  end
  local used, full_at, leaving = b.total - b.base, b.newest + b.period, b.oldest
  if used == 0 then
    return b.limit, 0, 0, nil, full_at
  elseif used > b.limit and not b.rewound then
    leaving = pair_time(b, bisect(b, pair_total, b.expired, b.base + used - b.limit + 1))
  end
  return b.limit - used, full_at, (leaving or pair_time(b, b.expired)) + b.period, nil, full_at
end

return check, settle
