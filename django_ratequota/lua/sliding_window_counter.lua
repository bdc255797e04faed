-- sliding_window_counter: two fixed windows; the previous one counts by the share of it still in sight.
--
-- Stores  one string of 24 bytes: window index, units in it, units in the window before (big-endian doubles).
-- Admits  when previous * (1 - elapsed/period) + current + cost <= limit; kept exact by multiplying by the period.
-- Refund  takes from the current window first, then from the previous one.
-- Never   rotates what it only reads, and never depends on the limit it was written under.
-- Source  https://blog.cloudflare.com/counting-things-a-lot-of-different-things/

local function report(b)
  local used = b.previous * (b.period - b.elapsed) + b.current * b.period
  local full_at = b.current > 0 and b.start + 2 * b.period or b.previous > 0 and b.start + b.period or 0
  return math.max(0, math.floor((b.limit * b.period - used) / b.period)), full_at
end

-- The first instant at which the formula admits this cost, if nobody else asks.
local function admitted_at(b, cost)
  if cost > b.limit then
    return NEVER
  elseif b.current + cost <= b.limit then
    return b.start + b.period - math.floor((b.limit - b.current - cost) * b.period / b.previous)
  end
  return b.start + 2 * b.period - math.floor((b.limit - cost) * b.period / b.current)
end

return {
  check = function(b, now, cost)
    local index = math.floor(now / b.period)
    b.index, b.current, b.previous = index, 0, 0
    if b.value and #b.value == 24 then
      local stored, current, previous = struct.unpack('>ddd', b.value)
      if stored >= index then
        b.index, b.current, b.previous = stored, current, previous
      elseif stored == index - 1 then
        b.previous = current
      end
    end
    b.start = b.index * b.period
    b.elapsed = math.max(0, now - b.start)
    if b.previous * (b.period - b.elapsed) + (b.current + cost) * b.period <= b.limit * b.period then
      return true, 0, report(b)
    end
    return false, admitted_at(b, cost), report(b)
  end,

  commit = function(b, units)
    local current = b.current + units
    b.current = math.max(0, current)
    b.previous = math.max(0, b.previous + math.min(0, current))
    save(b, struct.pack('>ddd', b.index, b.current, b.previous), b.start + 2 * b.period)
    return report(b)
  end,
}
