-- fixed_window: units counted in consecutive windows.
--
-- Stores  one string of 16 bytes: window start (µs), units counted in it (big-endian doubles); of a calendar
--         window 24 bytes, its finish as well.
-- Admits  when count + cost <= limit.
-- Windows begin at multiples of the period since the Unix epoch, or are the caller's calendar window
-- [b.start, b.finish). A stored window that is newer stays the current one: the clock went back, or months begin on
-- another day now; then the caller's finish ends it.
-- Lost    counts are given as b.seed, the units known to be used in the caller's calendar window, or in the newer one
--         that goes on until its finish.
-- Refund  takes nothing of a charge in an earlier window. While the clock is back before this one, a charge of this one
--         is known by when it was counted until, b.since + b.level.
-- Never   depends on the limit it was written under: an edited limit keeps the units counted.

local function check(b, value, now, cost)
  local start, finish, calendar, count = b.start, b.finish, b.finish > 0, nil
  if not calendar then
    start = now - now % b.period
    finish = start + b.period
  end
  if value and #value == (calendar and 24 or 16) then
    local stored, counted = struct.unpack('>dd', value)
    local stored_finish = calendar and struct.unpack('>d', value, 17) or stored + b.period
    if stored > start then
      start, finish = stored, finish > stored and finish or stored_finish
    end
    if stored == start then
      count = counted
      if finish ~= stored_finish then
        b.moved = true -- the calendar has changed: the key must live as long as the new window
      end
    end
  end
  if b.seed and b.seed > (count or 0) and start < b.finish then
    count, b.moved = b.seed, true
  end
  b.start, b.finish, b.count, b.calendar = start, finish, count, calendar
  if (count or 0) + cost <= b.limit then
    return true
  elseif cost > b.limit then
    return false
  end
  return false, finish
end

local function settle(b, units, now)
  local count, finish, value = b.count or 0, b.finish, nil
  if units then
    if not b.level or b.since >= b.start or now < b.start and b.since + b.level > b.start then
      count = count + units
    end
    if count < 0 then
      count = 0
    end
    value = b.calendar and struct.pack('>ddd', b.start, count, finish) or struct.pack('>dd', b.start, count)
  end
  local full_at = count > 0 and finish or 0
  return b.limit - count, full_at, full_at, value, finish, b.count and not b.moved
end

return check, settle
