-- sliding_window_counter: two fixed windows; the previous one counts by its share of the last period.
--
-- Stores  one string of 24 bytes: window index, units in it, units in the window before (big-endian doubles).
-- Admits  when previous * (1 - elapsed/period) + current + cost <= limit; kept exact by multiplying by the period.
-- Refund  takes from the window charged, which is counted until b.since + b.level; without b.level, from the
--         current window first, then from the previous one.
-- Never   rotates on a read, and never depends on the limit it was written under.
-- Source  https://blog.cloudflare.com/counting-things-a-lot-of-different-things/

-- The first instant at which the formula admits this cost, without other requests.
local function admitted_at(b, cost, current, previous)
  local limit, period = b.limit, b.period
  local later, early = 1, (limit - current - cost) * period / previous
  if current + cost > limit then
    later, early = 2, (limit - cost) * period / current
  end
  return b.start + later * period - (early - early % 1)
end

local function check(b, value, now, cost)
  local period, current, previous = b.period, nil, 0
  local index = now / period
  index = index - index % 1
  if value and #value == 24 then
    local stored, counted, before = struct.unpack('>ddd', value)
    if stored >= index then
      local ahead = stored * period - now
      if ahead > period and ahead > FAR_US then
        b.rewound, stored = true, index
      end
      index, current, previous = stored, counted, before
    elseif stored == index - 1 then
      previous = counted
    end
  end
  local start = index * period
  b.start, b.current, b.previous = start, current, previous
  current = current or 0
  local elapsed = now > start and now - start or 0
  if previous * (period - elapsed) + (current + cost) * period <= b.limit * period then
    return true
  elseif cost > b.limit then
    return false
  end
  return false, admitted_at(b, cost, current, previous)
end

local function settle(b, units, now)
  local start, period, current, previous, value = b.start, b.period, b.current or 0, b.previous, nil
  if units then
    local ends = b.level and (b.since + b.level - start) / period
    if not ends or ends == 2 then
      current = current + units
    elseif ends == 1 then
      previous = previous + units
    end
    if current < 0 then
      current, previous = 0, previous + (ends and 0 or current)
    end
    if previous < 0 then
      previous = 0
    end
    value = struct.pack('>ddd', start / period, current, previous)
  end
  local elapsed = now > start and now - start or 0
  local free = (b.limit * period - (previous * (period - elapsed) + current * period)) / period
  free = free > 0 and free - free % 1 or 0
  local full_at = current > 0 and start + 2 * period or previous > 0 and start + period or 0
  return free, full_at, admitted_at(b, free + 1, current, previous), value, start + 2 * period, b.current ~= nil
end

return check, settle
