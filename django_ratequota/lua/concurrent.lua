-- concurrent: requests that run at the same time, each in a slot from its check until its release.
--
-- Stores  one string of 32 bytes per slot: its id, since when it is held (µs), when its lease ends (µs), and how long
--         the lease is (µs) (big-endian doubles). The period is the length of a lease, and b.id whose slot this is; nil
--         = nobody's.
-- Admits  when fewer than limit slots of others are held. An id that holds one already takes no second one.
-- Counts  a slot while the end of its lease is ahead, by at most the lease and FAR_US. All others are dropped by the
--         first check that sees them, refused or not: so whatever happens to the clock, nobody waits longer for a slot
--         that is not renewed, and setting the clock again does not bring it back.
-- Release release.lua does it, by id; renew.lua prolongs leases.
-- Never   waits for a slot: a refused request is told to try again after RETRY_US, as nobody knows when one is free.
--         Never makes a table of the slots: with 1,000 of them, that took longer than all else.

local RETRY_US, SIZE, MOST_BYTES = 1000000, 32, 32000

-- Counts the slots, and finds the own one; false = there is one that counts no longer.
local function scan(b, value, now)
  b.others, b.own, b.finish = 0, nil, now
  for at = 1, #value, SIZE do
    local id, _, ends, lease = struct.unpack('>dddd', value, at)
    if not counts(now, ends, lease) then
      return false
    elseif id == b.id then
      b.own = at
    else
      b.others = b.others + 1
    end
    b.finish = ends > b.finish and ends or b.finish
  end
  return true
end

-- The slots that count.
local function running(value, now)
  local parts = {}
  for at = 1, #value, SIZE do
    local _, _, ends, lease = struct.unpack('>dddd', value, at)
    if counts(now, ends, lease) then
      parts[#parts + 1] = value:sub(at, at + SIZE - 1)
    end
  end
  return table.concat(parts)
end

local function check(b, value, now, _)
  if not value or #value % SIZE ~= 0 or #value > MOST_BYTES then
    value = ''
  end
  if not scan(b, value, now) then
    b.rewound, value = true, running(value, now)
    scan(b, value, now)
  end
  b.value = value
  if b.own or b.others < b.limit then
    return true
  end
  return false, now + RETRY_US
end

local function settle(b, units, now)
  local value, own, finish = b.value, b.own, b.finish
  if units and units > 0 then
    local since, ends = own and select(2, struct.unpack('>dd', value, own)) or now, now + b.period
    own, finish = own or #value + 1, ends > finish and ends or finish
    value = value:sub(1, own - 1) .. struct.pack('>dddd', b.id, since, ends, b.period) .. value:sub(own + SIZE)
  end
  local held = #value / SIZE
  local full_at = held > 0 and now + RETRY_US or 0
  return b.limit - held, full_at, full_at, value, finish
end

return check, settle
