#!lua
-- denied: which commands the caller's ACL keeps from the other scripts, which would fail half way.
--
-- KEYS    [1] any key of ours.
-- ARGV    the commands, in upper case.
-- Returns those that may not be run on that key. Runs none of them.

local denied = {}
for _, command in ipairs(ARGV) do
  if not redis.acl_check_cmd(command, KEYS[1], KEYS[1], KEYS[1], KEYS[1]) then
    denied[#denied + 1] = command
  end
end
return denied
