-- gcra: the generic cell rate algorithm as virtual scheduling: one theoretical arrival time (TAT).
--
-- Stores  one string of 24 bytes: TAT (whole µs), the rest of it in 1/limit µs, the limit that it was written
--         under (big-endian doubles). With the limit at hand, an edited one keeps the units used:
--         (TAT - now) * limit is units used times period, under whichever limit. Until the next commit they
--         drain as they were written.
-- Admits  when max(TAT, now) + cost * period/limit - now <= burst * period/limit.
-- Exact   within the bounds that token_bucket.lua states.
-- Source  ITU-T I.371, annex A

local function check(b, value, now, cost)
  local ahead, drain = 0, b.limit
  if value and #value == 24 then
    local tat, rest
    tat, rest, drain = struct.unpack('>ddd', value)
    ahead = (tat - now) * drain + rest
    if ahead < 0 then
      ahead = 0
    end
  end
  b.ahead, b.drain = ahead, drain
  local excess = ahead + cost * b.period - b.burst * b.period
  if excess <= 0 then
    return true
  elseif cost > b.burst then
    return false
  end
  local wait = excess / drain
  return false, now + (wait + -wait % 1)
end

local function settle(b, units, now)
  local ahead, drain, period, value = b.ahead, b.drain, b.period, nil
  if units then
    ahead, drain = ahead + units * period, b.limit
    if ahead < 0 then
      ahead = 0
    end
    local whole = ahead / drain
    whole = whole - whole % 1
    value = struct.pack('>ddd', now + whole, ahead - whole * drain, drain)
  end
  local free, time = (b.burst * period - ahead) / period, ahead / drain
  local full_at = now + (time + -time % 1)
  return free - free % 1, ahead > 0 and full_at or 0, value, full_at
end

return check, settle
