-- memory: replaces the server's keys when attempts are replayed. The algorithms after it use this redis instead of
-- the server's, so the same files serve both scripts.
--
-- A bucket's string stays in b.value. Its list is the table b.key: the items that the caller passed, packed as
-- big-endian doubles, and those pushed since. Nothing here reads or writes a key, or knows a TTL.

-- A list of the packed items; '' = an empty list.
local function new_list(packed)
  return {packed = packed, front = 0, count = #packed / 8, pushed = {}, first = #packed / 8}
end

local function list_item(list, i)
  local at = list.front + i
  if at < list.first then
    return (struct.unpack('>d', list.packed, 8 * at + 1))
  end
  return list.pushed[at - list.first + 1]
end

-- The packed items for the next slice.
local function packed_list(list)
  local parts = {list.packed:sub(8 * list.front + 1)}
  for i = math.max(0, list.front - list.first) + 1, #list.pushed do
    parts[#parts + 1] = struct.pack('>d', list.pushed[i])
  end
  return table.concat(parts)
end

local commands = {
  LLEN = function(list)
    return list.count
  end,
  LINDEX = list_item,
  -- Without negative positions, as no algorithm uses them.
  LRANGE = function(list, start, stop)
    local items = {}
    for i = start, math.min(stop, list.count - 1) do
      items[#items + 1] = list_item(list, i)
    end
    return items
  end,
  RPUSH = function(list, ...)
    for _, item in ipairs({...}) do
      list.pushed[#list.pushed + 1] = tonumber(item)
      list.count = list.count + 1
    end
  end,
  -- At the front only, as a replay has no refunds.
  LTRIM = function(list, start)
    list.front, list.count = list.front + start, list.count - start
  end,
  DEL = function(list)
    list.front, list.count = list.front + list.count, 0
  end,
}

local function call(command, list, ...)
  return commands[command](list, ...)
end

local redis = {call = call, pcall = call}
