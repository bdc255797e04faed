-- For wrk: each request comes from the next of BENCH_USERS users (0 = anonymous); prints one line of JSON when done.
local users = tonumber(os.getenv('BENCH_USERS'))
local requests, at = {}, 0

function init()
  for number = 1, math.max(1, users) do
    local headers = users > 0 and { Authorization = 'Number ' .. number } or {}
    requests[number] = wrk.format('GET', nil, headers)
  end
end

function request()
  at = at % #requests + 1
  return requests[at]
end

function done(summary, latency)
  local errors = summary.errors
  local failed = errors.connect + errors.write + errors.status + errors.timeout
  local line = '{"requests": %d, "seconds": %f, "p99_us": %f, "failed": %d}\n'
  io.write(string.format(line, summary.requests, summary.duration / 1e6, latency:percentile(99), failed))
end
