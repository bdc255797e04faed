-- replay: checks attempts one after the other, each at its own instant, as the driver would; uses no key.
--
-- ARGV    [1] the attempts, packed as pairs of big-endian doubles: time (µs), cost (units), in the order of time.
--             Time 0: another subject begins, with nothing used.
--         then seven per rate: algorithm, limit, period (µs), burst, the state after the slice before ('' = none),
--         calendar windows packed as pairs, start and finish (µs; '' = none), in the order of time; 1 = it counts
--         requests, whatever they cost, 0 = units.
-- Returns one character per attempt (1 admitted, 0 refused, - for a time 0), then each rate's state.
-- Either all rates admit an attempt and are charged, or none of them is charged.

local STRIDE = 7
local MAX_US = 9007199254740991

local function whole(value, least, what)
  local n = tonumber(value)
  if not n or n < least or n > MAX_US or n ~= math.floor(n) then
    error('ratequota: ' .. what .. ' must be a whole number from ' .. least .. ' to 2^53, not ' .. tostring(value))
  end
  return n
end

local function check_pairs(packed, what)
  if #packed % 16 ~= 0 then
    error('ratequota: ' .. what .. ' must be pairs of doubles, not ' .. #packed .. ' bytes')
  end
end

if #ARGV == 0 or (#ARGV - 1) % STRIDE ~= 0 then
  error('ratequota: a replay takes its attempts and seven arguments per rate, not ' .. #ARGV .. ' arguments')
end
check_pairs(ARGV[1], 'attempts')
local now
local buckets = {}
for at = 2, #ARGV, STRIDE do
  local check, settle = algorithm(ARGV[at])
  if not check then
    error('ratequota: unknown algorithm ' .. tostring(ARGV[at]))
  end
  local b = {
    check = check, settle = settle, limit = whole(ARGV[at + 1], 1, 'a limit'),
    period = whole(ARGV[at + 2], 1, 'a period'), burst = whole(ARGV[at + 3], 1, 'a burst'), value = ARGV[at + 4],
    windows = {}, window = 1,
  }
  b.units = ARGV[at + 6] == '1' and 1 or nil
  b.listed = ARGV[at] == 'sliding_window_log'
  b.key = new_list(b.listed and b.value or '')
  check_pairs(ARGV[at + 5], 'windows')
  if #ARGV[at + 5] > 0 and #b.value >= 8 then
    b.counted, b.value = struct.unpack('>d', b.value), b.value:sub(9)
  end
  for position = 1, #ARGV[at + 5], 16 do
    local start, finish = struct.unpack('>dd', ARGV[at + 5], position)
    b.windows[#b.windows + 1] = {start = start, finish = finish}
  end
  buckets[#buckets + 1] = b
end

-- The calendar window around now. Times go back only where another subject begins: the search starts at the last one.
local function enter_window(b)
  b.start, b.finish = 0, 0
  if #b.windows == 0 then
    return
  end
  for _ = 1, #b.windows do
    local window = b.windows[b.window]
    if now >= window.start and now < window.finish then
      b.start, b.finish = window.start, window.finish
      if b.start ~= b.counted then
        b.counted, b.value = b.start, '' -- a key of its own
      end
      return
    end
    b.window = b.window % #b.windows + 1
  end
  error('ratequota: no calendar window contains ' .. string.format('%.0f', now))
end

local function admit(cost)
  for _, b in ipairs(buckets) do
    enter_window(b)
    if not b.check(b, b.value, now, b.units or cost, b.key) then
      return '0'
    end
  end
  for _, b in ipairs(buckets) do
    local units = b.units or cost
    if units > 0 then
      local _, _, _, value = b.settle(b, units, now)
      b.value = value
    end
  end
  return '1'
end

local outcomes = {}
for position = 1, #ARGV[1], 16 do
  local at, cost = struct.unpack('>dd', ARGV[1], position)
  now = whole(at, 0, 'a time')
  if now == 0 then
    for _, b in ipairs(buckets) do
      b.value, b.key, b.counted = '', new_list(''), nil
    end
    outcomes[#outcomes + 1] = '-'
  else
    outcomes[#outcomes + 1] = admit(whole(cost, 0, 'a cost'))
  end
end

local reply = {table.concat(outcomes)}
for _, b in ipairs(buckets) do
  local counted = b.counted and struct.pack('>d', b.counted) or ''
  reply[#reply + 1] = b.listed and packed_list(b.key) or counted .. b.value
end
return reply
