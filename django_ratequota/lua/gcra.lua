-- gcra: the generic cell rate algorithm as virtual scheduling: one theoretical arrival time (TAT).
--
-- Stores  one string of 24 bytes: TAT (whole µs), the rest of it in 1/limit µs, the limit that it was written
--         under (big-endian doubles). With the limit at hand, an edited one keeps the units used:
--         (TAT - now) * limit is units used times period, under whichever limit. Until the next commit they
--         drain as they were written.
-- Admits  when max(TAT, now) + cost * period/limit - now <= burst * period/limit.
-- Exact   within the bounds that token_bucket.lua states.
-- Source  ITU-T I.371, annex A

local function report(b)
  local free = b.burst * b.period - b.ahead
  return math.max(0, math.floor(free / b.period)), b.ahead > 0 and b.now + math.ceil(b.ahead / b.drain) or 0
end

return {
  check = function(b, now, cost)
    b.now, b.ahead, b.drain = now, 0, b.limit
    if b.value and #b.value == 24 then
      local tat, rest, limit = struct.unpack('>ddd', b.value)
      b.ahead, b.drain = math.max(0, (tat - now) * limit + rest), limit
    end
    local excess = b.ahead + cost * b.period - b.burst * b.period
    if excess <= 0 then
      return true, 0, report(b)
    end
    return false, cost <= b.burst and now + math.ceil(excess / b.drain) or NEVER, report(b)
  end,

  commit = function(b, units)
    b.ahead, b.drain = math.max(0, b.ahead + units * b.period), b.limit
    local whole = math.floor(b.ahead / b.limit)
    save(b, struct.pack('>ddd', b.now + whole, b.ahead - whole * b.limit, b.limit), b.now + math.ceil(b.ahead / b.limit))
    return report(b)
  end,
}
