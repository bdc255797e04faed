-- slots: what renew.lua and release.lua share: the slots of one counter, see concurrent.lua.

local SIZE, MOST_BYTES = 32, 32000
local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

-- Calls each(id, since, ends, lease) for the slots that count; returns how many are stored.
local function read(key, each)
  local value = redis.call('MGET', key)[1]
  if value and #value % SIZE == 0 and #value <= MOST_BYTES then
    for at = 1, #value, SIZE do
      local id, since, ends, lease = struct.unpack('>dddd', value, at)
      if counts(now, ends, lease) then
        each(id, since, ends, lease)
      end
    end
    return #value / SIZE
  end
  return 0
end

local function write(key, parts, finish)
  if #parts > 0 then
    redis.call('SET', key, table.concat(parts), 'PX', math.ceil((finish - now) / 1000) + 1000)
  else
    redis.call('DEL', key)
  end
end
