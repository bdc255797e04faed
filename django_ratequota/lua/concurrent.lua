-- concurrent: requests that run at the same time, each in a slot from its check until its release.
--
-- Stores  one string of 24 bytes per slot: its id, since when it is held (µs), when its lease ends (µs) (big-endian
--         doubles). The period is how long a lease is, and b.id whose slot this is; 0 = nobody's.
-- Admits  when fewer than limit slots of others are held. An id that holds one already takes no second one.
-- Refund  releases the slot of this id, once; a lease that ended has released it before.
-- Never   waits for a slot: a refused request is told to try again after RETRY_US, as nobody knows when one is free.

local RETRY_US, MOST_BYTES = 1000000, 24000

local function check(b, value, now, _)
  local held, others = {}, 0
  if value and #value % 24 == 0 and #value <= MOST_BYTES then
    for at = 1, #value, 24 do
      local id, since, ends = struct.unpack('>ddd', value, at)
      if ends - now > b.period + FAR_US then
        b.rewound, since, ends = true, now, now + b.period
      end
      if ends > now then
        held[#held + 1] = {id, since, ends}
        if id == b.id then
          b.own = #held
        else
          others = others + 1
        end
      end
    end
  end
  b.held = held
  if b.own or others < b.limit then
    return true
  end
  return false, now + RETRY_US
end

local function settle(b, units, now)
  local held, value, finish = b.held, nil, now
  if units and units > 0 then
    held[b.own or #held + 1] = {b.id, b.own and held[b.own][2] or now, now + b.period}
  elseif units and units < 0 and b.own then
    table.remove(held, b.own)
  end
  if units then
    local parts = {}
    for i = 1, #held do
      parts[i] = struct.pack('>ddd', unpack(held[i]))
      finish = held[i][3] > finish and held[i][3] or finish
    end
    value = table.concat(parts)
  end
  local full_at = #held > 0 and now + RETRY_US or 0
  return b.limit - #held, full_at, full_at, value, finish
end

return check, settle
