-- leaky_bucket: requests pour their cost into a bucket of size burst that drains at limit/period.
--
-- Stores  what token_bucket stores: level times period, time of the last drain (µs), limit and burst.
-- Admits  when max(0, level - elapsed * limit/period) + cost <= burst.
-- The level equals the used tokens of a token bucket with the same numbers, and both admit the same requests, so the
-- arithmetic is token_bucket's. As a queue (mode acquire) it has another counter; see queue.lua.
-- Source  https://en.wikipedia.org/wiki/Leaky_bucket#As_a_meter

return algorithm('token_bucket')
