-- queue: books slots (Limiter.acquire): up to burst units at once after a pause, then one every interval.
--
-- Stores  one string of 16 bytes: when it was written, and how much later the last slot is (µs, big-endian doubles).
-- Admits  a cost at the last slot + cost * interval. The last slot counts as burst * interval ago at the earliest, and
--         the interval is period/limit, rounded up to whole µs.
-- Edited  The state knows no rate, and its key no period: so the next slot under any rate is behind all booked ones.
-- Refund  moves the last slot back by the part of the charge that has not drained. While a slot is ahead of now, only
--         the last one gives anything back: others have slots behind them, or are of a queue that was reset. Without
--         b.level, takes the newest units.
-- Source  ITU-T I.371, annex A: its TAT, less burst * interval, which does not depend on the burst

local function check(b, value, now, cost)
  local interval = b.period / b.limit
  interval = interval + -interval % 1
  local last, at = nil, now
  if value and #value == 16 then
    local written, later = struct.unpack('>dd', value)
    if written - now > b.period and written - now > FAR_US then
      b.rewound, written = true, now
    elseif written > now then
      at = written
    end
    last = written + later
  end
  local earliest = at - b.burst * interval
  if not (last and last > earliest) then -- NaN, too
    last = earliest
  end
  b.interval, b.last, b.at = interval, last, at
  local slot = last + cost * interval
  if slot <= at then
    return true
  end
  return false, cost <= b.burst and slot or nil
end

local function settle(b, units)
  local interval, last, at, value = b.interval, b.last, b.at, nil
  local burst = b.burst * interval
  if units then
    if units < 0 then
      local full_at = b.level and b.since + b.level or last + burst
      local slot = full_at - burst
      if last == slot or last <= at and slot <= at then
        last = last - math.max(0, math.min(-units * interval, full_at - at, last + burst - at))
      end
    else
      last = last + units * interval
    end
    value = struct.pack('>dd', at, last - at)
  end
  local free, full_at = (at - last) / interval, last + burst
  free = free > 0 and free - free % 1 or 0
  return free, full_at > at and full_at or 0, last + (free + 1) * interval, value, full_at
end

return check, settle
