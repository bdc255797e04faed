-- renew: prolongs the leases of slots whose requests still run, of any number of counters.
--
-- KEYS    the slots of one counter each, see concurrent.lua
-- ARGV    [1] clock (µs; 0 = the server's TIME), then one per key: its limit, and for each slot its id and how long its
--         lease is (µs), all as big-endian doubles
-- Returns, as text, how many of them are held now.
-- Never   holds more than limit slots: one that has lapsed, as its process was suspended or the clock was set, is taken
--         again only where there is room.

local count = 0
for i = 1, #KEYS do
  local slots = ARGV[i + 1]
  local limit, leases, parts, finish = struct.unpack('>d', slots), {}, {}, 0
  for at = 9, #slots, 16 do
    local id, lease = struct.unpack('>dd', slots, at)
    leases[id] = lease
  end
  local function keep(id, since, ends, lease)
    if leases[id] then
      ends, lease, leases[id], count = now + leases[id], leases[id], nil, count + 1
    end
    parts[#parts + 1] = struct.pack('>dddd', id, since, ends, lease)
    finish = ends > finish and ends or finish
  end
  read(KEYS[i], keep)
  for at = 9, #slots, 16 do
    local id = struct.unpack('>d', slots, at)
    if leases[id] and #parts < limit then
      keep(id, now, now, leases[id])
    end
  end
  write(KEYS[i], parts, finish)
end
return tostring(count)
