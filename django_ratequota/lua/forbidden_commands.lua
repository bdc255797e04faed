#!lua
-- forbidden_commands: which commands the caller's ACL forbids; the other scripts would fail half-way by them.
--
-- KEYS    [1] any key of ours.
-- ARGV    the commands, in upper case.
-- Returns the commands that may not run on that key. Runs none of them.

local forbidden = {}
for _, command in ipairs(ARGV) do
  if not redis.acl_check_cmd(command, KEYS[1], KEYS[1], KEYS[1], KEYS[1]) then
    forbidden[#forbidden + 1] = command
  end
end
return forbidden
