#!lua
-- prelude: the first line of the script, and the rules for all of its files.
--
-- The algorithms are branches of one function, algorithm(name): a call creates only the two functions that it needs.
-- A table of all of them took longer to create than checking a bucket.
-- x - x % 1 is the floor of x, x + -x % 1 its ceiling: exact, and without a function call.
-- A stored time that is ahead of now by more than the period and FAR_US was stored under a wrong clock: check sets
-- b.rewound and takes the usage as of now, and settle stores it so. Else callers would wait until that time.

-- A slot of a concurrent rate counts while its lease ends in the future, and no later than a lease of that length may
-- end: the longest is an hour.

local FAR_US = 60000000

local function counts(now, ends, lease)
  return ends > now and ends - now <= lease + FAR_US and lease <= 3600000000
end
