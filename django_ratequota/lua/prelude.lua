#!lua
-- prelude: the first line of the script, and what all of its files keep to.
--
-- The algorithms are parts of one function, algorithm(name): a call makes the two functions that it asks for, and no
-- table of all of them, which took longer than judging a bucket.
-- x - x % 1 is the floor of x, x + -x % 1 its ceiling: exact, and no call of a function.
