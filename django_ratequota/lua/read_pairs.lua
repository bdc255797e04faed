#!lua
-- read_pairs: hashes, or sorted sets, of the statistics as one text. As a list, each item would take a client without
-- hiredis two microseconds, and there are tens of thousands.
--
-- KEYS    hashes, or sorted sets.
-- ARGV    [1] hash or zset   [2] how the fields or members to return begin ("" = all)
-- Returns JSON: for each key {field, value ...} or {member, score ...}, all as text; {} for none. Writes nothing.

local kind, prefix = ARGV[1], ARGV[2]
local found = {}
for at, key in ipairs(KEYS) do
  local all = kind == 'hash' and redis.call('HGETALL', key) or redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  local kept = prefix == '' and all or {}
  if prefix ~= '' then
    for i = 1, #all, 2 do
      if string.sub(all[i], 1, #prefix) == prefix then
        kept[#kept + 1] = all[i]
        kept[#kept + 1] = all[i + 1]
      end
    end
  end
  found[at] = kept
end
return cjson.encode(found)
