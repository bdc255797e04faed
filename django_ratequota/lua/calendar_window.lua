-- calendar_window: units counted in one day, week or month; its first day is in the key's name.
--
-- Stores  one string of 16 bytes: units charged, units refunded (big-endian doubles). Both only grow.
-- Admits  when charged - refunded + cost <= limit.
-- Refund  goes to the window of its charge, also when that is over.
-- Never   depends on the limit it was written under: an edited limit keeps the units counted.

local DURABLE_US = 345600000000

local function check(b, value, now, cost)
  b.charged, b.refunded, b.known = 0, 0, value and #value == 16
  if b.known then
    b.charged, b.refunded = struct.unpack('>dd', value)
  end
  if b.charged - b.refunded + cost <= b.limit then
    return true
  elseif cost > b.limit then
    return false
  end
  return false, b.finish
end

local function settle(b, units, now)
  local value = nil
  if units and (units > 0 or b.known) then
    if units > 0 then
      b.charged = b.charged + units
    else
      b.refunded = b.refunded - units
      b.refunded = b.refunded < b.charged and b.refunded or b.charged
    end
    value = struct.pack('>dd', b.charged, b.refunded)
  end
  local used = b.charged - b.refunded
  local full_at = used > 0 and b.finish or 0
  -- While the database may still learn of a refund, the key of a durable count stays, also at zero.
  return b.limit - used, full_at, full_at, value, b.durable and b.finish + DURABLE_US or b.finish, b.known
end

return check, settle
