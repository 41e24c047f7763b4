"""The Lua that runs inside Redis: a row's end is written down once, whoever ends it.

Owns the scripts' text and the order of their arguments. The keys are drawn in store.py; KEYS[1] is always
the batch's hash, and every other key of the batch is that name with a suffix. Must not know Python's side.

They are sent with EVAL, not EVALSHA: most run inside a MULTI, which cannot recover from NOSCRIPT after a
Redis restart. The text is a few hundred bytes for up to hundreds of rows.
"""

from __future__ import annotations

_ROW = """
-- True when this is the first end of an accepted row. result '' means: the row's RQ job returned it.
local function end_row(id, outcome, result)
  local file, line = string.match(id, '-(%d+)-(%d+)$')
  -- A forged line that is no bit's number would be an error, and cost the rows after it their end.
  if not file or tonumber(line) >= 2 ^ 32 or string.match(line, '^0.') then return false end
  if redis.call('GETBIT', KEYS[1] .. ':lines:' .. file, line) == 0 then return false end
  if redis.call('SETBIT', KEYS[1] .. ':ended:' .. file, line, 1) == 1 then return false end
  redis.call('HINCRBY', KEYS[1] .. ':counts', outcome, 1)
  if result == '' then
    redis.call('XADD', KEYS[1] .. ':log', '*', 'j', id)
  else
    redis.call('XADD', KEYS[1] .. ':log', '*', 'j', id, 'r', result)
  end
  return true
end
"""

_SETTLE = """
-- When the last row of a batch that takes no more rows has ended, its keys start to age.
local function settle()
  local batch = redis.call('HMGET', KEYS[1], 'state', 'files', 'keep_seconds')
  if not batch[1] or batch[1] == 'open' then return end
  local n = redis.call('HMGET', KEYS[1] .. ':counts', 'rows', 'completed', 'failed', 'cancelled')
  if (tonumber(n[2] or 0) + tonumber(n[3] or 0) + tonumber(n[4] or 0)) < tonumber(n[1] or 0) then return end
  local keys = {KEYS[1], KEYS[1] .. ':counts', KEYS[1] .. ':ids', KEYS[1] .. ':log'}
  for file = 0, batch[2] - 1 do
    keys[#keys + 1] = KEYS[1] .. ':lines:' .. file
    keys[#keys + 1] = KEYS[1] .. ':ended:' .. file
  end
  for _, key in ipairs(keys) do redis.call('EXPIRE', key, batch[3]) end
end
"""

# ARGV: prompt tokens, completion tokens, when the rows were taken and when they completed ('' '': none did),
#       then (job id, outcome, result) for each row. Returns the rows ended.
LOG = (
    _ROW
    + _SETTLE
    + """
local ended = 0
for i = 5, #ARGV, 3 do
  if end_row(ARGV[i], ARGV[i + 1], ARGV[i + 2]) then ended = ended + 1 end
end
if ended > 0 then
  if ARGV[3] ~= '' then
    redis.call('HSETNX', KEYS[1] .. ':counts', 'started_at', ARGV[3])
    redis.call('HSET', KEYS[1] .. ':counts', 'completed_at', ARGV[4])
  end
  redis.call('HINCRBY', KEYS[1] .. ':counts', 'prompt_tokens', ARGV[1])
  redis.call('HINCRBY', KEYS[1] .. ':counts', 'completion_tokens', ARGV[2])
  settle()
end
return ended
"""
)

# ARGV: the state wanted. Nothing but an open batch changes state. Returns the state it is in now, or nothing.
SET_STATE = (
    _SETTLE
    + """
if redis.call('HGET', KEYS[1], 'state') == 'open' or
   (ARGV[1] == 'cancelled' and redis.call('HGET', KEYS[1], 'state') == 'closed') then
  redis.call('HSET', KEYS[1], 'state', ARGV[1])
  settle()
end
return redis.call('HGET', KEYS[1], 'state')
"""
)

_JOB = """
-- Where a row's RQ job is: RQ's status, "gone", or "abandoned" (started, but nobody holds a lease on it).
-- ARGV[1..2]: RQ's key prefixes of jobs and of executions.
-- RQ notes a run of a job until a minute after its lease ends.
local now = redis.call('TIME')[1]
local function whereabouts(id)
  local status = redis.call('HGET', ARGV[1] .. id, 'status')
  if not status then return 'gone' end
  if status == 'started' and redis.call('ZCOUNT', ARGV[2] .. id, now + 60, '+inf') == 0 then
    return 'abandoned'
  end
  return status
end
"""

# ARGV: two key prefixes, then job ids. Returns the whereabouts of each; '' for a row that has ended.
WHERE = (
    _JOB
    + """
local found = {}
for i = 3, #ARGV do
  local file, line = string.match(ARGV[i], '-(%d+)-(%d+)$')
  local ended = redis.call('GETBIT', KEYS[1] .. ':ended:' .. file, line) == 1
  found[#found + 1] = ended and '' or whereabouts(ARGV[i])
end
return found
"""
)

# Ends rows without a worker. KEYS[2]: RQ's registry of cancelled jobs. ARGV: two key prefixes, seconds to
# keep a cancelled job, then (job id, whereabouts as seen, outcome, result). A row that has moved on since is
# left alone. A queued job becomes RQ's "canceled"; its id stays in the queue's list until a worker drops it.
END = (
    _ROW
    + _SETTLE
    + _JOB
    + """
local ended = 0
for i = 4, #ARGV, 4 do
  local id = ARGV[i]
  if whereabouts(id) == ARGV[i + 1] and end_row(id, ARGV[i + 2], ARGV[i + 3]) then
    ended = ended + 1
    if ARGV[i + 1] == 'queued' or ARGV[i + 1] == 'abandoned' then
      redis.call('HSET', ARGV[1] .. id, 'status', 'canceled')
      redis.call('ZADD', KEYS[2], now, id)
      redis.call('EXPIRE', ARGV[1] .. id, ARGV[3])
    end
  end
end
if ended > 0 then settle() end
return ended
"""
)
