#!lua
-- renew: prolongs the leases of slots that are still held, see concurrent.lua.
--
-- KEYS    [1] the slots of one counter
-- ARGV    [1] clock (µs; 0 = the server's TIME)   [2] how long a lease is (µs)   [3] the ids, as big-endian doubles
-- Returns how many of them are held.
-- Never   takes a slot: one whose lease has ended, or that was released, stays free, so renewing may come late.

local MOST_US = 3600000000 + 60000000
local now, lease, prolonged = tonumber(ARGV[1]), tonumber(ARGV[2]), {}
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
for at = 1, #ARGV[3], 8 do
  prolonged[struct.unpack('>d', ARGV[3], at)] = true
end
local value, parts, count, finish = redis.call('MGET', KEYS[1])[1], {}, 0, 0
if value and #value % 24 == 0 and #value <= 24000 then
  for at = 1, #value, 24 do
    local id, since, ends = struct.unpack('>ddd', value, at)
    if ends - now > MOST_US then -- stored under a wrong clock, see concurrent.lua
      since, ends = now, now + lease
    end
    if ends > now then
      if prolonged[id] then
        ends, count = now + lease, count + 1
      end
      parts[#parts + 1] = struct.pack('>ddd', id, since, ends)
      finish = ends > finish and ends or finish
    end
  end
end
if count > 0 then
  redis.call('SET', KEYS[1], table.concat(parts), 'PX', math.ceil((finish - now) / 1000) + 1000)
end
return count
