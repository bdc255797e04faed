-- token_bucket: tokens drip in at limit/period up to burst; a request takes its cost in tokens.
--
-- Stores  one string of 16 bytes: units used times period, time of the last refill (µs) (big-endian doubles).
--         Tokens are burst minus the units used: so an edited limit or burst keeps what was used.
-- Admits  when min(burst, tokens + elapsed * limit/period) >= cost.
-- Exact   while burst * period in µs stays below 2^53 (100,000/day, 2,500,000/hour), as all figures are then
--         whole numbers; beyond that an error stays far below a microsecond's refill.
-- Source  https://en.wikipedia.org/wiki/Token_bucket

local function report(b)
  local free = b.burst * b.period - b.used
  return math.max(0, math.floor(free / b.period)), b.used > 0 and b.at + math.ceil(b.used / b.limit) or 0
end

return {
  check = function(b, now, cost)
    b.used, b.at = 0, now
    if b.value and #b.value == 16 then
      local used, at = struct.unpack('>dd', b.value)
      b.at = math.max(now, at)
      b.used = math.max(0, used - (b.at - at) * b.limit)
    end
    local excess = b.used + cost * b.period - b.burst * b.period
    if excess <= 0 then
      return true, 0, report(b)
    end
    return false, cost <= b.burst and b.at + math.ceil(excess / b.limit) or NEVER, report(b)
  end,

  commit = function(b, units)
    b.used = math.max(0, b.used + units * b.period)
    save(b, struct.pack('>dd', b.used, b.at), b.at + math.ceil(b.used / b.limit))
    return report(b)
  end,
}
