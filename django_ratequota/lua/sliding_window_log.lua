-- sliding_window_log: the admitted requests of the last period, each with its time; exact.
--
-- Stores  one list of pairs: time (µs), running total of units up to and with that request. A pair takes at most
--         16 bytes until the total passes 2^31, whatever the cost. The newest expired pair stays in front: its
--         total is what those behind it are counted from.
-- Admits  when the units of requests newer than now - period, plus cost, are at most the limit.
-- Refund  takes the newest requests' units.
-- Never   reads the whole list: bounds are found by bisection. Never trims what it only reads.

local function pair_time(b, i)
  return tonumber(redis.call('LINDEX', b.key, 2 * i))
end

local function pair_total(b, i)
  return tonumber(redis.call('LINDEX', b.key, 2 * i + 1))
end

-- The first pair in [low, b.pairs) whose figure is at least bound; b.pairs when there is none.
local function bisect(b, figure, low, bound)
  local high = b.pairs
  while low < high do
    local middle = math.floor((low + high) / 2)
    if figure(b, middle) < bound then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local function report(b)
  local used = b.total - b.base
  return math.max(0, b.limit - used), used > 0 and b.newest + b.period or 0
end

return {
  check = function(b, now, cost)
    b.pairs = math.floor(redis.call('LLEN', b.key) / 2)
    b.at, b.newest, b.expired, b.base, b.total = now, 0, 0, 0, 0
    if b.pairs > 0 then
      b.newest, b.total = pair_time(b, b.pairs - 1), pair_total(b, b.pairs - 1)
      b.at = math.max(now, b.newest)
      b.expired = bisect(b, pair_time, 0, b.at - b.period + 1)
      b.base = b.expired > 0 and pair_total(b, b.expired - 1) or 0
    end
    local excess = b.total - b.base + cost - b.limit
    if excess <= 0 then
      return true, 0, report(b)
    elseif cost > b.limit then
      return false, NEVER, report(b)
    end
    return false, pair_time(b, bisect(b, pair_total, b.expired, b.base + excess)) + b.period, report(b)
  end,

  commit = function(b, units)
    if units > 0 then
      if b.total == b.base then
        redis.call('DEL', b.key)
        b.base, b.total = 0, 0
      elseif b.expired > 1 then
        redis.call('LTRIM', b.key, 2 * (b.expired - 1), -1)
      end
      b.total, b.newest = b.total + units, b.at
      redis.call('RPUSH', b.key, string.format('%.0f', b.newest), string.format('%.0f', b.total))
    elseif units < 0 and b.total > b.base then
      b.total = math.max(b.base, b.total + units)
      local last = bisect(b, pair_total, b.expired, b.total)
      if b.total == b.base then
        redis.call('DEL', b.key)
        return report(b)
      end
      redis.call('LTRIM', b.key, 0, 2 * last + 1)
      redis.call('LSET', b.key, -1, string.format('%.0f', b.total))
      b.newest = pair_time(b, last)
    end
    expire(b, b.newest + b.period)
    return report(b)
  end,
}
