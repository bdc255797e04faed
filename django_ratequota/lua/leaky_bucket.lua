-- leaky_bucket: requests pour their cost into a bucket of size burst that drains at limit/period.
--
-- Stores  one string of 16 bytes: level times period, time of the last drain (µs) (big-endian doubles).
-- Admits  when max(0, level - elapsed * limit/period) + cost <= burst.
-- The level is what a token bucket of the same numbers has used, and the two admit the same requests, so the
-- arithmetic is token_bucket's. As a queue (mode acquire) the level may rise above burst: each unit above it
-- is a booked slot, served first come, first served, one every period/limit.
-- Source  https://en.wikipedia.org/wiki/Leaky_bucket#As_a_meter

return algorithm('token_bucket')
