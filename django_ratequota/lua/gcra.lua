-- gcra: the generic cell rate algorithm, in the second of its two equivalent forms, as a continuous-state leaky bucket.
--
-- Its theoretical arrival time (TAT) is the instant at which the bucket is empty: level over limit/period from now.
-- Kept as level and time, it drains faster at once when a limit is raised, which the instant alone does not allow;
-- so arithmetic, state and guarantees are token_bucket's.
-- Admits  when max(TAT, now) + cost * period/limit - now <= burst * period/limit.
-- Source  ITU-T I.371, annex A

return algorithm('token_bucket')
