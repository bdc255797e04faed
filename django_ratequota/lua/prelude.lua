#!lua
-- prelude: what the algorithm chunks share. They are chunks of one script, so these locals are in their sight.
--
-- NEVER   returned for "admitted at" when waiting cannot help (cost above capacity).
-- now     the script's one reading of the clock (µs), set by the driver.
-- save    writes a bucket's string; expire gives a key the time that its state matters, plus a second.

local NEVER = -1
local now
local algorithms = {}
-- Ten years: debts may take longer to pay, keys need not outlive them.
local MAX_TTL_MS = 315619200000

-- ms until the instant (µs): rounded up, plus the second that makes up for whatever clock the server expires by.
local function ttl_ms(until_us)
  return math.min(math.max(0, math.ceil((until_us - now) / 1000)) + 1000, MAX_TTL_MS)
end

local function save(b, value, until_us)
  redis.call('SET', b.key, value, 'PX', ttl_ms(until_us))
end

local function expire(b, until_us)
  redis.call('PEXPIRE', b.key, ttl_ms(until_us))
end
