#!lua
-- raise: raises counters of calendar windows to what the database says of them, in case the store lost some.
--
-- KEYS    the counters
-- ARGV    [1] 1 = counters that are missing are made, 0 = they stay missing.
--         [2] three big-endian doubles per key: units charged and refunded, and how long it is to live from now (ms).
-- Returns three big-endian int64 per key as one text: units charged and refunded now, and by how many both were raised.
-- Never   lowers a total, so it may be repeated and come late.

local makes = tonumber(ARGV[1]) == 1
local values = redis.call('MGET', unpack(KEYS))
local reply = {}
for i = 1, #KEYS do
  local charged, refunded, ttl = struct.unpack('>ddd', ARGV[2], 24 * i - 23)
  local value, had, gave = values[i], 0, 0
  if value and #value == 16 then
    had, gave = struct.unpack('>dd', value)
  end
  charged = charged > had and charged or had
  -- What was charged and refunded by others, and is not in the database yet, must not mint room.
  refunded = refunded > gave and (refunded < charged and refunded or charged) or gave
  if not value and not makes then
    had, gave = charged, refunded
  elseif charged > had or refunded > gave or not value then
    redis.call('SET', KEYS[i], struct.pack('>dd', charged, refunded), 'PX', ttl)
  end
  reply[i] = struct.pack('>i8i8i8', charged, refunded, charged - had + refunded - gave)
end
return table.concat(reply)
