-- token_bucket: tokens drip in at limit/period up to burst; a request takes its cost in tokens.
--
-- Stores  one string of 16 bytes: units used times period, time of the last refill (µs) (big-endian doubles).
--         Tokens are burst minus the units used: so an edited limit or burst keeps what was used.
-- Admits  when min(burst, tokens + elapsed * limit/period) >= cost.
-- Exact   while burst * period in µs stays below 2^53 (100,000/day, 2,500,000/hour), as all figures are then
--         whole numbers; beyond that an error stays far below a microsecond's refill.
-- Source  https://en.wikipedia.org/wiki/Token_bucket

local function check(b, value, now, cost)
  local used, at = 0, now
  if value and #value == 16 then
    used, at = struct.unpack('>dd', value)
    if at < now then
      used, at = used - (now - at) * b.limit, now
    end
    if used < 0 then
      used = 0
    end
  end
  b.used, b.at = used, at
  local excess = used + cost * b.period - b.burst * b.period
  if excess <= 0 then
    return true
  elseif cost > b.burst then
    return false
  end
  local wait = excess / b.limit
  return false, at + (wait + -wait % 1)
end

local function settle(b, units)
  local used, at, period = b.used, b.at, b.period
  if units then
    used = used + units * period
    if used < 0 then
      used = 0
    end
  end
  local free, drain = (b.burst * period - used) / period, used / b.limit
  local full_at = at + (drain + -drain % 1)
  return free - free % 1, used > 0 and full_at or 0, units and struct.pack('>dd', used, at), full_at
end

return check, settle
