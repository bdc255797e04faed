-- release: releases slots of any number of counters.
--
-- KEYS    the slots of one counter each, see concurrent.lua
-- ARGV    [1] clock (µs; 0 = the server's TIME), then one per key: the ids of its slots, as big-endian doubles
-- Returns, as text, how many of them were held.
-- Never   counts a slot twice: releasing one again changes nothing.

local count = 0
for i = 1, #KEYS do
  local ids, parts, finish = {}, {}, 0
  for at = 1, #ARGV[i + 1], 8 do
    ids[struct.unpack('>d', ARGV[i + 1], at)] = true
  end
  local stored = read(KEYS[i], function(id, since, ends, lease)
    if ids[id] then
      count = count + 1
    else
      parts[#parts + 1] = struct.pack('>dddd', id, since, ends, lease)
      finish = ends > finish and ends or finish
    end
  end)
  if #parts < stored then
    write(KEYS[i], parts, finish)
  end
end
return tostring(count)
