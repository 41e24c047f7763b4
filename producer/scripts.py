"""The Lua that runs inside Redis: a row's end is written down once, whoever ends it.

Owns the scripts' text and the order of their arguments. The keys are drawn in store.py; KEYS[1] is always
the batch's hash, and every other key of the batch is that name with a suffix. Must not know Python's side.
LOG_ROWS is also part of the worker's script that ends rows in RQ and here at once: worker/scripts.py.
An error stops a script and undoes nothing, so what may fail comes before what is written, or is undone.

They are sent with EVAL, not EVALSHA: most run inside a MULTI, which cannot recover from NOSCRIPT after a
Redis restart. The text is a few hundred bytes for up to hundreds of rows.
"""

from __future__ import annotations

LOG_ROWS = """
-- True when this is the first end of an accepted row. result '' means: the row's RQ job returned it.
local function end_row(batch, id, outcome, result)
  local file, line = string.match(id, '-(%d+)-(%d+)$')
  -- A forged line that is no bit's number would be an error, and cost the rows after it their end.
  if not file or tonumber(line) >= 2 ^ 32 or string.match(line, '^0.') then return false end
  if redis.call('GETBIT', batch .. ':lines:' .. file, line) == 0 then return false end
  if redis.call('GETBIT', batch .. ':ended:' .. file, line) == 1 then return false end
  redis.call('HINCRBY', batch .. ':counts', outcome, 1)
  local entry = {'*', 'j', id}
  if result ~= '' then entry = {'*', 'j', id, 'r', result} end
  local noted = redis.pcall('XADD', batch .. ':log', unpack(entry))
  if type(noted) == 'table' then  -- somebody spoilt the log: the row has not ended
    redis.call('HINCRBY', batch .. ':counts', outcome, -1)
    error(noted)
  end
  redis.call('SETBIT', batch .. ':ended:' .. file, line, 1)
  return true
end

-- When the last row of a batch that takes no more rows has ended, its keys start to age.
local function age(batch)
  local is = redis.call('HMGET', batch, 'state', 'files', 'keep_seconds')
  if not is[1] or is[1] == 'open' then return end
  local n = redis.call('HMGET', batch .. ':counts', 'rows', 'completed', 'failed', 'cancelled')
  if (tonumber(n[2] or 0) + tonumber(n[3] or 0) + tonumber(n[4] or 0)) < tonumber(n[1] or 0) then return end
  local keys = {batch, batch .. ':counts', batch .. ':ids', batch .. ':log'}
  for file = 0, is[2] - 1 do
    keys[#keys + 1] = batch .. ':lines:' .. file
    keys[#keys + 1] = batch .. ':ended:' .. file
  end
  for _, key in ipairs(keys) do redis.call('EXPIRE', key, is[3]) end
end

-- Damaged counts are for those to report who read them.
local function settle(batch) pcall(age, batch) end

-- Ends rows of one batch, (job id, outcome, result) each. from, till: when the completed ones were taken and
-- when they completed; '' '' where none did. Returns the rows ended; an error of one row waits for the rest.
local function log_rows(batch, prompt_tokens, completion_tokens, from, till, rows)
  local ended, failure = 0, nil
  for i = 1, #rows, 3 do
    local is_sound, answer = pcall(end_row, batch, rows[i], rows[i + 1], rows[i + 2])
    if not is_sound then failure = answer elseif answer then ended = ended + 1 end
  end
  if ended > 0 then
    if from ~= '' then
      redis.call('HSETNX', batch .. ':counts', 'started_at', from)
      redis.call('HSET', batch .. ':counts', 'completed_at', till)
    end
    redis.pcall('HINCRBY', batch .. ':counts', 'prompt_tokens', prompt_tokens)
    redis.pcall('HINCRBY', batch .. ':counts', 'completion_tokens', completion_tokens)
    settle(batch)
  end
  if failure then error(failure) end
  return ended
end
"""

_UNBLOCK = """
-- A Redis above its maxmemory lets a script write only if it has written already, and this counts. Batches
-- are closed and cancelled there, and lost rows ended: else no reader comes to an end, and none releases.
redis.call('EXPIRE', KEYS[1] .. ':nothing', 1)
"""

# ARGV: (job id, outcome, result) for each row, none of them completed. Returns the rows ended.
LOG = LOG_ROWS + "return log_rows(KEYS[1], 0, 0, '', '', ARGV)"

# ARGV: the state wanted. Nothing but an open batch changes state. Returns the state it is in now, or nothing.
SET_STATE = (
    LOG_ROWS
    + _UNBLOCK
    + """
if redis.call('HGET', KEYS[1], 'state') == 'open' or
   (ARGV[1] == 'cancelled' and redis.call('HGET', KEYS[1], 'state') == 'closed') then
  redis.call('HSET', KEYS[1], 'state', ARGV[1])
  settle(KEYS[1])
end
return redis.call('HGET', KEYS[1], 'state')
"""
)

_JOB = """
-- Where a row's RQ job is: RQ's status, "gone", "abandoned" (started, but nobody holds a lease on it), or
-- "unknown" (a status that is none).
-- ARGV[1..2]: RQ's key prefixes of jobs and of executions.
-- RQ notes a run of a job until a minute after its lease ends.
local now = redis.call('TIME')[1]
local function whereabouts(id)
  local status = redis.pcall('HGET', ARGV[1] .. id, 'status')
  if type(status) ~= 'string' then return 'gone' end  -- or no hash any more
  if #status > 20 or not string.match(status, '^[%l_]+$') then return 'unknown' end
  local runs = status == 'started' and redis.pcall('ZCOUNT', ARGV[2] .. id, now + 60, '+inf')
  if runs and (type(runs) ~= 'number' or runs == 0) then return 'abandoned' end
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
    LOG_ROWS
    + _UNBLOCK
    + _JOB
    + """
local ended = 0
for i = 4, #ARGV, 4 do
  local id = ARGV[i]
  if whereabouts(id) == ARGV[i + 1] and end_row(KEYS[1], id, ARGV[i + 2], ARGV[i + 3]) then
    ended = ended + 1
    if ARGV[i + 1] == 'queued' or ARGV[i + 1] == 'abandoned' then
      redis.call('HSET', ARGV[1] .. id, 'status', 'canceled')
      redis.pcall('ZADD', KEYS[2], now, id)
      redis.call('EXPIRE', ARGV[1] .. id, ARGV[3])
    end
  end
end
if ended > 0 then settle(KEYS[1]) end
return ended
"""
)

# Queues waiting rows that their queue's list does not name: somebody deleted it, or the row's lease. Claims
# are one script, too: a row is in the list, or leased. KEYS[2]: the list. ARGV: two key prefixes, how many
# entries of the list may be looked at, then (job id, whereabouts as seen). Returns the rows put back. Fails
# where the list is something else.
PUT_BACK = (
    _UNBLOCK
    + _JOB
    + """
local looks, length, back = tonumber(ARGV[3]), redis.call('LLEN', KEYS[2]), 0
for i = 4, #ARGV, 2 do
  local id = ARGV[i]
  looks = looks - length
  if looks < 0 then break end
  if whereabouts(id) == ARGV[i + 1] and (length == 0 or not redis.call('LPOS', KEYS[2], id)) then
    redis.call('RPUSH', KEYS[2], id)
    redis.call('HSET', ARGV[1] .. id, 'status', 'queued', 'worker_name', '')
    back = back + 1
  end
end
return back
"""
)
