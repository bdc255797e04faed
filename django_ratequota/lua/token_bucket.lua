-- token_bucket: tokens drip in at limit/period up to burst; a request takes its cost in tokens.
--
-- Stores  one string of 20 bytes: units used times period, time of the last refill (µs) (big-endian doubles), the
--         limit that it was written under (4 bytes); with a burst of its own, or a limit from 2^32 on, 32 bytes:
--         limit and burst are doubles as well.
--         Tokens are burst minus the units used, so an edited limit or burst keeps the usage.
-- Admits  when min(burst, tokens + elapsed * limit/period) >= cost.
-- Edited  Until the next charge, usage drains by the faster of the two limits, and counts as at most one full
--         bucket, the larger of the two. A charge under the slower limit cuts it to one of its own buckets.
--         So nobody waits longer than the longer of the two rates' times from empty to full.
-- Refund  takes what has not drained of the charge. Its b.units drain evenly in b.level µs, as its share of all that
--         drains, so that overlapping refunds mint at most one bucket. If the oldest units drained first, a refund
--         would need to know what others have taken of older ones. Without b.level, takes the newest units.
--         It is no usage under the caller's rate, so the state stays under the rate that it was written under.
-- Exact   while burst * period in µs stays below 2^53 (100,000/day, 2,500,000/hour), as all numbers are then
--         whole; beyond that the error stays far below a microsecond's refill.
-- Source  https://en.wikipedia.org/wiki/Token_bucket

local function check(b, value, now, cost)
  local used, at, drain, burst, period = 0, now, b.limit, b.burst, b.period
  if value then
    local limit, size = drain, burst
    if #value == 20 then
      used, at, limit = struct.unpack('>ddI4', value)
      size = limit
    elseif #value == 32 then
      used, at, limit, size = struct.unpack('>dddd', value)
    end
    local held = used
    if limit ~= drain or size ~= burst then
      b.written, b.size = limit, size
      if b.refunding then
        drain = limit
      else
        used, drain = math.min(used, math.max(size, burst) * period), math.max(limit, drain)
      end
      b.drain = drain
    end
    -- Neither is NaN after this, whatever was stored.
    if not (at >= now) then
      used, at = used - (now - at) * drain, now
    elseif at - now > period and at - now > FAR_US then
      b.rewound, at = held, now
    end
    if not (used > 0) then
      used = 0
    end
  end
  b.used, b.at = used, at
  local excess = used + cost * period - burst * period
  if excess <= 0 then
    return true
  elseif cost > burst then
    return false
  end
  local wait = excess / drain
  return false, at + (wait + -wait % 1)
end

-- What is used once the units of a refund are taken.
local function without(b, units)
  local used, limit, held = b.used, b.limit, b.used
  if b.level then
    local passed, pace = math.max(0, b.at - b.since), b.units * b.period / b.level
    pace = pace + -pace % 1 + math.max(0, (b.written or 0) - limit)
    held = passed < b.level and b.units * b.period - passed * pace or 0
    if b.written then -- an edit left no more of it
      held = math.min(held, (b.written < limit and b.size or math.max(b.size, b.burst)) * b.period)
    end
  end
  return used - math.max(0, math.min(units * b.period, held, used))
end

local function settle(b, units)
  local used, at, period, limit, burst = b.used, b.at, b.period, b.limit, b.burst
  local drain, finish, value = b.drain or limit, nil, nil
  if units then
    local kept, size = limit, burst
    if units <= 0 then
      used, kept, size = units < 0 and without(b, -units) or b.rewound, b.written or limit, b.size or burst
    else
      if drain > limit then
        used = math.min(used, burst * period)
      end
      used, drain = used + units * period, limit
    end
    if size == kept and kept < 4294967296 then
      value = struct.pack('>ddI4', used, at, kept)
    else
      value = struct.pack('>dddd', used, at, kept, size)
    end
    if kept ~= limit or size ~= burst then
      local time = used / kept
      finish = at + (time + -time % 1)
      used, drain = math.min(used, math.max(size, burst) * period), math.max(kept, limit)
    end
  end
  local free, time = (burst * period - used) / period, used / drain
  free = free > 0 and free - free % 1 or 0
  local full_at, more = at + (time + -time % 1), (used - (burst - free - 1) * period) / drain
  finish = finish and finish > full_at and finish or full_at
  return free, used > 0 and full_at or 0, at + (more + -more % 1), value, finish
end

return check, settle
