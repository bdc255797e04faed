-- fixed_window: units counted in consecutive windows.
--
-- Stores  one string of 16 bytes: window start (µs), units counted in it (big-endian doubles).
-- Admits  when count + cost <= limit.
-- Windows begin at multiples of the period since the Unix epoch. A stored window that is newer, because the clock went
-- back, stays the current one; far ahead, its count moves to the window of now.
-- Refund  takes nothing of a charge in an earlier window. While the clock is back before this one, a charge of this one
--         is known by when it was counted until, b.since + b.level.
-- Never   depends on the limit it was written under: an edited limit keeps the units counted.

local function check(b, value, now, cost)
  local start, count = now - now % b.period, nil
  if value and #value == 16 then
    local stored, counted = struct.unpack('>dd', value)
    if stored - now > b.period and stored - now > FAR_US then
      b.rewound, count = true, counted
    elseif stored >= start then
      start, count = stored, counted
    end
  end
  b.start, b.finish, b.count = start, start + b.period, count
  if (count or 0) + cost <= b.limit then
    return true
  elseif cost > b.limit then
    return false
  end
  return false, b.finish
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
    value = struct.pack('>dd', b.start, count)
  end
  local full_at = count > 0 and finish or 0
  return b.limit - count, full_at, full_at, value, finish, b.count
end

return check, settle
