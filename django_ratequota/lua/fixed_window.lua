-- fixed_window: units counted in consecutive windows.
--
-- Stores  one string of 16 bytes: window start (µs), units counted in it (big-endian doubles); of a calendar
--         window 24 bytes, its finish as well.
-- Admits  when count + cost <= limit.
-- Windows begin at multiples of the period since the Unix epoch, or are the caller's calendar window
-- [b.start, b.finish). A stored window that is newer than now (the clock went back) stays the current one.
-- Never   depends on the limit it was written under: an edited limit keeps the units counted.

local function report(b)
  return math.max(0, b.limit - b.count), b.count > 0 and b.finish or 0
end

return {
  check = function(b, now, cost)
    b.calendar = b.finish > 0
    if not b.calendar then
      b.start = now - now % b.period
      b.finish = b.start + b.period
    end
    b.count = 0
    if b.value and #b.value == (b.calendar and 24 or 16) then
      local start, count = struct.unpack('>dd', b.value)
      if start > b.start then
        b.start = start
        b.finish = b.calendar and struct.unpack('>d', b.value, 17) or start + b.period
      end
      b.count = start == b.start and count or 0
    end
    if b.count + cost <= b.limit then
      return true, 0, report(b)
    end
    return false, cost <= b.limit and b.finish or NEVER, report(b)
  end,

  commit = function(b, units)
    b.count = math.max(0, b.count + units)
    local value = struct.pack('>dd', b.start, b.count)
    save(b, b.calendar and value .. struct.pack('>d', b.finish) or value, b.finish)
    return report(b)
  end,
}
