-- token_bucket: tokens drip in at limit/period up to burst; a request takes its cost in tokens.
--
-- Stores  one string of 20 bytes: units used times period, time of the last refill (µs) (big-endian doubles), the
--         limit that it was written under (4 bytes); with a burst of its own, or a limit from 2^32 on, 32 bytes:
--         limit and burst are doubles as well. The burst is negative while booked slots may lie ahead. With 56 bytes,
--         units used times period, limit and burst as they were before a slower limit's charge cut them off.
--         Tokens are burst minus the units used, so an edited limit or burst keeps the usage.
-- Admits  when min(burst, tokens + elapsed * limit/period) >= cost.
-- Edited  Until the next charge, usage drains by the faster of the two limits, and counts as at most one full
--         bucket, the larger of the two. A charge under the slower limit counts it as at most one of its own buckets.
--         So nobody waits longer than the longer of the two rates' times from empty to full.
--         What that cut off keeps counting for limits faster than the slower one, until it would have drained.
-- Refund  takes the part of the charge that has not drained: the oldest units drain first, so its own are the last of
--         the b.level µs. Without b.level, takes the newest units. Takes no slot behind which another one is booked,
--         and leaves the state under the rate that it was written under.
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
    elseif #value == 32 or #value == 56 then
      used, at, limit, size = struct.unpack('>dddd', value)
      if size < 0 then
        b.booked, size = true, -size
      end
      if #value == 56 then
        local more, fast, room = struct.unpack('>ddd', value, 33)
        if drain > limit and not b.refunding then -- nothing was cut off for this limit
          used, limit, size = more, fast, room
        else
          b.more, b.fast, b.room = at < now and more - (now - at) * fast or more, fast, room
        end
      end
    end
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
    end
    if not (used > 0) then
      used = 0
    end
    -- A refund keeps the rate that the slots were booked under; its caller's may differ.
    if b.booked and used <= (b.refunding and size or burst) * period then
      b.booked = nil
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

local function settle(b, units)
  local used, at, period, limit, burst = b.used, b.at, b.period, b.limit, b.burst
  local drain, finish, value = b.drain or limit, nil, nil
  if units then
    local kept, size = limit, burst
    if units < 0 then
      local refunded = -units * period
      local left = b.level and b.level * limit - (at - b.since) * math.max(limit, b.written or 0)
      local more = b.more and b.more - math.max(0, math.min(refunded, left or refunded))
      if left and b.written then -- an edit left no more of it
        left = math.min(left, (b.written < limit and b.size or math.max(b.size, burst)) * period)
      end
      -- The last booked slot is the top of the usage.
      if not b.booked or (left or 0) >= used then
        used, b.more = used - math.max(0, math.min(refunded, left or used, used)), more
      end
      -- A refund is no usage under the caller's rate: the state stays under the rate that it was written under.
      kept, size = b.written or limit, b.size or burst
      if used == 0 and b.more and b.more > 0 then
        used, kept, size, drain, b.more, b.booked = b.more, b.fast, b.room, b.fast, nil, nil
      end
    else
      local before, over = used, used + units * period - burst * period
      if drain > limit and b.booking and over > 0 then
        -- The slot begins at the instant in its caller's reply, and the next slot behind it.
        local later = over * limit / drain
        used = used - over + later + -later % 1
      elseif drain > limit and used > burst * period then
        used = burst * period
      end
      if used < before and not b.more then -- faster limits keep counting the usage before
        b.more, b.fast, b.room = before, b.written, b.size
      end
      if b.more then
        b.more = math.max(b.more, math.min(b.more + units * period, b.room * period))
      end
      used, drain = used + units * period, limit
    end
    local queue = (b.booked or b.booking) and used > size * period
    if b.more and b.more > used then
      local time = math.max(b.more / b.fast, used / kept)
      finish = at + (time + -time % 1)
      value = struct.pack('>ddddddd', used, at, kept, queue and -size or size, b.more, b.fast, b.room)
      if limit > kept then
        used, kept, size, drain = b.more, b.fast, b.room, b.fast
      end
    elseif queue then
      value = struct.pack('>dddd', used, at, kept, -size)
    elseif size == kept and kept < 4294967296 then
      value = struct.pack('>ddI4', used, at, kept)
    else
      value = struct.pack('>dddd', used, at, kept, size)
    end
    if kept ~= limit or size ~= burst then
      local time = used / kept
      finish = math.max(finish or 0, at + (time + -time % 1))
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
