#!lua
-- prelude: the first line of the script, and the rules for all of its files.
--
-- The algorithms are branches of one function, algorithm(name): a call creates only the two functions that it needs.
-- A table of all of them took longer to create than checking a bucket.
-- x - x % 1 is the floor of x, x + -x % 1 its ceiling: exact, and without a function call.
