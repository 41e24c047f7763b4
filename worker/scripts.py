"""The Lua that runs inside Redis: a job is taken and leased in one step, and a lease ends in one step.

Owns the scripts' text and the order of their arguments; leases.py calls them. They write RQ's own keys in
RQ's own form, which tests/worker/test_leases.py holds against RQ's classes. ARGV[1] is RQ's key prefix.

    {rq}:queue:{q}                 list    waiting job ids
    {rq}:job:{id}                  hash    the job
    {rq}:wip:{q}                   zset    "{id}:{execution}" -> when its lease ends (unix seconds)
    {rq}:execution:{id}:{ex}       hash    one run of a job
    {rq}:executions:{id}           zset    execution -> a minute after its lease ends
    {rq}:worker:{name}:executions  set     "{id}:{execution}" of the worker

An error stops a script and undoes nothing. So what may fail comes before what is written, or cannot stop it:
keys of one job, one queue or one worker may have been made into something else by anybody, hence pcall.
"""

from __future__ import annotations

from producer.scripts import LOG_ROWS

# Of a row that was taken so often and neither ended nor handed back, since its worker vanished. Machines do
# vanish, so it is taken as any other at first; then in small company, and in the end with no other row.
SUSPECT_LOSSES = 2
ALONE_LOSSES = 3

# What of a job a worker looks at; nothing else of the hash is fetched. The order is Claim's in leases.py.
FIELDS = (
    "data",
    "status",
    "success_callback_name",
    "failure_callback_name",
    "stopped_callback_name",
    "webhooks",
    "repeats_left",
    "rate_limit_key",
    "result_ttl",
    "failure_ttl",
    "livebatch_deaths",  # ours: engine deaths this row was in; RQ leaves fields it does not know alone
    "enqueued_at",
)

_LEASE = """
local rq = ARGV[1]

-- A Redis above its maxmemory lets a script write only if it has written already, and this counts. What
-- workers do must go through: else leases run out, ends cannot be written, rows run twice and none drains.
redis.call('DEL', rq .. ':nothing')

-- When leases end is a matter of this clock alone: those of workers differ.
local seconds, microseconds = unpack(redis.call('TIME'))
local clock = seconds + microseconds / 1e6

local function job_key(id) return rq .. ':job:' .. id end
local function wip_key(queue) return rq .. ':wip:' .. queue end

-- Whether this worker still owns this run of the job: nobody requeued, cancelled, deleted or took it.
local function owns(worker, queue, id, execution)
  if type(redis.pcall('ZSCORE', wip_key(queue), id .. ':' .. execution)) ~= 'string' then return false end
  local job = redis.pcall('HMGET', job_key(id), 'status', 'worker_name')
  return job[1] == 'started' and job[2] == worker
end

-- Whether any run of the job holds a lease that is not over.
local function is_leased(queue, id)
  for _, execution in ipairs(redis.pcall('ZRANGE', rq .. ':executions:' .. id, 0, -1)) do
    local till = redis.call('ZSCORE', wip_key(queue), id .. ':' .. execution)
    if till and tonumber(till) > clock then return true end
  end
  return false
end

-- A key of RQ's that somebody made into something else is of no use to anybody: it makes way.
local function make_way(key, kind)
  local is = redis.call('TYPE', key).ok
  if is ~= kind and is ~= 'none' then redis.call('DEL', key) end
end

-- Until when a run of a job is noted there: a minute after its lease ends.
local function note_run(id, execution, lease)
  local key = rq .. ':executions:' .. id
  if type(redis.pcall('ZADD', key, clock + lease + 60, execution)) == 'table' then
    make_way(key, 'zset')
    redis.call('ZADD', key, clock + lease + 60, execution)
  end
  redis.call('EXPIRE', key, math.ceil(lease) + 60)
end

-- All traces of one run.
local function forget(worker, queue, id, execution)
  local run = id .. ':' .. execution
  redis.pcall('ZREM', wip_key(queue), run)
  redis.call('DEL', rq .. ':execution:' .. run)
  redis.pcall('ZREM', rq .. ':executions:' .. id, execution)
  redis.pcall('SREM', rq .. ':worker:' .. worker .. ':executions', run)
end

-- Back to the front of its queue; no retry is consumed. A job that its list does not name would be lost, so
-- that comes first.
local function requeue(queue, id, now)
  redis.call('LPUSH', rq .. ':queue:' .. queue, id)
  redis.call('HSET', job_key(id), 'status', 'queued', 'worker_name', '', 'enqueued_at', now)
end
"""

# ARGV: rq, worker, execution prefix, now (RQ's text), lease seconds, room, largest data in bytes, our prefix
#       of batches' keys, data in bytes after which no more is taken, 'free' where the worker has no row in
#       hand, the number of fields, the fields, then (queue, quota) for each queue in order of priority.
# Returns for each id taken: queue, id, execution, field values, its batch's state and when that expires, how
# often it was lost; and beside the ids, whether all queues are empty now (1 or 0), and whether a row came up
# that may not run beside others (1 or 0): such rows were taken, and no others, or one waits for a worker that
# is free. execution '' means that it was not started: the list named something that is no job of RQ's, or one
# that already ended. data is its size if too large.
CLAIM = (
    _LEASE
    + f"local SUSPECT, ALONE = {SUSPECT_LOSSES}, {ALONE_LOSSES}"
    + """
local worker, prefix, text, batches = ARGV[2], ARGV[3], ARGV[4], ARGV[8]
local lease, room, largest = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local bytes, num_fields = tonumber(ARGV[9]), tonumber(ARGV[11])
local fields = {unpack(ARGV, 12, 11 + num_fields)}
fields[num_fields + 1], fields[num_fields + 2] = 'started_at', 'livebatch_losses'
local ended = {finished = true, failed = true, canceled = true, stopped = true}
local claims, taken = {}, 0
local few, met = math.max(2, math.floor(room / 16)), 0
local apart = ARGV[10] == 'free'  -- suspects alone may be taken; else all but suspects

-- How often a row was lost: as noted, and once more if it waits although it was started. Whoever puts lost
-- rows back (RECOVER, RQ's clean-up, producers) leaves started_at as it is; HAND_BACK empties it.
local function losses_of(started_at, noted)
  local losses = noted and tonumber(string.match(noted, '^%d%d?$')) or 0
  return (started_at or '') == '' and losses or losses + 1
end

-- Whether a row so often lost may be taken now: suspects a few at a time, at last one, and no other row.
local function may_take(losses)
  if losses < SUSPECT then return not apart end
  met = 1
  local seats = losses < ALONE and few or 1
  if not apart or taken >= seats then return false end
  room = math.min(room, seats)
  return true
end

local function start(queue, id, execution, losses)
  local run = id .. ':' .. execution
  redis.call('HSET', rq .. ':execution:' .. run, 'id', execution, 'job_id', id,
             'created_at', clock, 'last_heartbeat', clock, 'worker_name', worker)
  redis.call('EXPIRE', rq .. ':execution:' .. run, math.ceil(lease))
  note_run(id, execution, lease)
  redis.call('ZADD', wip_key(queue), clock + lease + taken / 1e6, run)  -- in order, for RECOVER
  redis.call('SADD', rq .. ':worker:' .. worker .. ':executions', run)
  redis.call('HSET', job_key(id), 'status', 'started', 'started_at', text, 'worker_name', worker,
             'last_heartbeat', text)
  if losses > 0 then redis.call('HSET', job_key(id), 'livebatch_losses', losses) end
  redis.call('PERSIST', job_key(id))
end

-- Field values, cut short where they are absurd: a hostile hash must not travel. And the row's losses.
local function look(id)
  local size = redis.pcall('HSTRLEN', job_key(id), 'data')
  if type(size) == 'table' then return nil, 0 end
  local values = redis.call('HMGET', job_key(id), unpack(fields, 2))
  local losses = losses_of(values[num_fields], values[num_fields + 1])
  for i = 1, num_fields - 1 do values[i] = string.sub(values[i] or '', 1, 200) end
  table.insert(values, 1, size > largest and tostring(size) or redis.call('HGET', job_key(id), 'data'))
  local batch = redis.pcall('HMGET', batches .. string.gsub(id, '%-%d+%-%d+$', ''), 'state', 'expires')
  for i = 1, 2 do values[num_fields + i] = batch[i] or '' end
  values[num_fields + 3] = losses
  return values, losses
end

local function take(queue)
  local id = redis.pcall('LPOP', rq .. ':queue:' .. queue)
  if type(id) ~= 'string' then return false end
  local values, losses = nil, 0
  if string.match(id, '^[%w_-]+$') then values, losses = look(id) end
  local is_over = values and (not values[1] and values[2] == '' or ended[values[2]])
  if not may_take(is_over and 0 or losses) then  -- what will not run harms nobody
    redis.call('LPUSH', rq .. ':queue:' .. queue, id)
    return false
  end
  taken = taken + 1
  if not values then
    claims[#claims + 1] = {queue, string.sub(id, 1, 200), '', {}}
  elseif is_over then
    claims[#claims + 1] = {queue, id, '', values}
  elseif not (values[2] == 'started' and is_leased(queue, id)) then
    local execution = prefix .. taken
    bytes = bytes - #(values[1] or '')
    start(queue, id, execution, losses)
    claims[#claims + 1] = {queue, id, execution, values}
  end
  return true
end

make_way(rq .. ':worker:' .. worker .. ':executions', 'set')
for i = 12 + num_fields, #ARGV, 2 do make_way(wip_key(ARGV[i]), 'zset') end
for pass = apart and 0 or 1, 2 do  -- suspects in front; each queue's quota; whoever has rows
  for i = 12 + num_fields, #ARGV, 2 do
    local quota = pass == 1 and tonumber(ARGV[i + 1]) or room
    while quota > 0 and taken < room and bytes > 0 and take(ARGV[i]) do quota = quota - 1 end
  end
  apart = apart and taken > 0
end
redis.call('EXPIRE', rq .. ':worker:' .. worker .. ':executions', math.ceil(lease) + 60)
local is_dry = 1
for i = 12 + num_fields, #ARGV, 2 do  -- an empty list is no key
  if redis.pcall('TYPE', rq .. ':queue:' .. ARGV[i]).ok == 'list' then is_dry = 0 end
end
return {claims, is_dry, met}
"""
)

# ARGV: rq, worker, lease seconds, then (queue, id, execution) for each lease.
# Returns the positions (from 0) of leases that are lost; a lost lease is not brought back.
RENEW = (
    _LEASE
    + """
local lease, lost = tonumber(ARGV[3]), {}
for i = 4, #ARGV, 3 do
  local queue, id, execution = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local run = id .. ':' .. execution
  if owns(ARGV[2], queue, id, execution) then
    redis.call('ZADD', wip_key(queue), clock + lease + i / 1e6, run)
    redis.pcall('HSET', rq .. ':execution:' .. run, 'last_heartbeat', clock)
    redis.call('EXPIRE', rq .. ':execution:' .. run, math.ceil(lease))
    note_run(id, execution, lease)
  else
    forget(ARGV[2], queue, id, execution)
    lost[#lost + 1] = (i - 4) / 3
  end
end
return lost
"""
)

# ARGV: rq, worker, now (unix), now (RQ's text), 'all' or 'free', then for each lease
#       queue, id, execution, the job's status, RQ's registry, seconds to keep, packed reason or '',
#       RQ's result: kind or '', field, value,
#       our log: the batch's key or '', outcome, inline result or '', prompt tokens, completion tokens,
#       when the row was taken (unix).
# Ends the jobs that are still ours, for RQ and for us. Only what changed of a hash is written: RQ's own
# finish writes it whole, prompt and all. Returns for each: 0 not ours any more, 1 ended, 2 ours and left as
# it is, since other jobs wait for it and 'free' ends none of those.
END = (
    LOG_ROWS
    + _LEASE
    + """
local worker, now = ARGV[2], tonumber(ARGV[3])
local states, batches = {}, {}
local tally = {completed = 0, failed = 0, cancelled = 0, seconds = 0}

local function end_job(queue, id, execution, status, registry, keep, reason, kind, field, value)
  redis.call('HSET', job_key(id), 'status', status, 'ended_at', ARGV[4], 'last_heartbeat', ARGV[4])
  if reason ~= '' then redis.call('HSET', job_key(id), 'exc_info', reason) end
  redis.call('EXPIRE', job_key(id), keep)
  if kind ~= '' then
    local results = rq .. ':results:' .. id
    local function add(call)
      return call('XADD', results, 'MAXLEN', '~', 10, '*', 'type', kind, 'worker_name', worker, field, value,
                  'execution_id', execution, 'execution_ended_at', ARGV[3])
    end
    if type(add(redis.pcall)) == 'table' then  -- no stream, or one that takes no more
      redis.call('DEL', results)
      add(redis.call)
    end
    redis.call('EXPIRE', results, keep)
  end
  -- Scored as RQ does: by when an entry may go; in the registry of cancelled jobs by when it came.
  local score = math.floor(now) + (registry == 'canceled' and 0 or keep)
  redis.pcall('ZADD', rq .. ':' .. registry .. ':' .. queue, score, id)
end

-- Whether the log has the row's end already. RQ's cleanup is not atomic: it may have queued a job again that
-- ended while it looked, and the row has run once more.
local function has_ended(batch, id)
  local file, line = string.match(id, '-(%d+)-(%d+)$')
  if batch == '' or not file or tonumber(line) >= 2 ^ 32 then return false end
  return redis.pcall('GETBIT', batch .. ':ended:' .. file, line) == 1
end

-- What the log and the worker's totals shall say of a row that ended.
local function note(id, batch, outcome, result, prompt_tokens, completion_tokens, taken)
  tally[outcome] = tally[outcome] + 1
  tally.seconds = tally.seconds + math.max(0, now - taken)
  if batch == '' then return end
  local its = batches[batch] or {rows = {}, prompt = 0, completion = 0, from = '', till = ''}
  batches[batch] = its
  for _, part in ipairs({id, outcome, result}) do its.rows[#its.rows + 1] = part end
  if outcome ~= 'completed' then return end
  its.prompt, its.completion = its.prompt + prompt_tokens, its.completion + completion_tokens
  if its.from == '' or tonumber(taken) < tonumber(its.from) then its.from, its.till = taken, ARGV[3] end
end

for i = 6, #ARGV, 16 do
  local queue, id, execution = unpack(ARGV, i, i + 2)
  local state = owns(worker, queue, id, execution) and 1 or 0
  local waits = redis.call('TYPE', job_key(id) .. ':dependents').ok == 'set'
  if state == 1 and ARGV[5] == 'free' and waits then state = 2 end
  if state == 1 then
    local fields, is_first = {unpack(ARGV, i, i + 9)}, not has_ended(ARGV[i + 10], id)
    if not is_first then fields[8] = '' end  -- the result that is there stands
    end_job(unpack(fields))
    if is_first then note(id, unpack(ARGV, i + 10, i + 15)) end
  end
  if state < 2 then forget(worker, queue, id, execution) end
  states[#states + 1] = state
end
for batch, its in pairs(batches) do  -- keys of a batch that somebody broke cost no other batch its log
  pcall(log_rows, batch, its.prompt, its.completion, its.from, its.till, its.rows)
end
local failed = tally.failed + tally.cancelled
if tally.completed + failed > 0 then
  local totals = rq .. ':worker:' .. worker
  redis.pcall('HINCRBY', totals, 'successful_job_count', tally.completed)
  redis.pcall('HINCRBY', totals, 'failed_job_count', failed)
  redis.pcall('HINCRBYFLOAT', totals, 'total_working_time', tally.seconds)
end
return states
"""
)

# ARGV: rq, worker, now (RQ's text), then (queue, id, execution) for each lease, in the order they shall run.
# Returns how many were ours and are back at the front of their queues. Where a queue is no list any more, its
# leases are left to run out: RECOVER puts those rows back when there is one again.
HAND_BACK = (
    _LEASE
    + """
local returned = 0
for i = #ARGV - 2, 4, -3 do
  local queue, id, execution = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local ours = owns(ARGV[2], queue, id, execution)
  local is_list = type(redis.pcall('LLEN', rq .. ':queue:' .. queue)) == 'number'
  if not ours or is_list then forget(ARGV[2], queue, id, execution) end
  if ours and is_list then
    requeue(queue, id, ARGV[3])
    redis.call('HSET', job_key(id), 'started_at', '')  -- as if it had never been taken: it is not lost
    returned = returned + 1
  end
end
return returned
"""
)

# ARGV: rq, queue, now (RQ's text), most rows. Runs whose lease is over end, and their jobs go
# back to the front of the queue in their old order. Returns the ids. An error while the queue is no list.
RECOVER = (
    _LEASE
    + """
local queue, back = ARGV[2], {}
local runs = redis.call('ZRANGEBYSCORE', wip_key(queue), '-inf', clock, 'LIMIT', 0, ARGV[4])
if #runs > 0 then redis.call('LLEN', rq .. ':queue:' .. queue) end  -- or fail, before any is forgotten
for i = #runs, 1, -1 do
  local id, execution = string.match(runs[i], '^(.+):([^:]+)$')
  if not id then
    redis.call('ZREM', wip_key(queue), runs[i])
  else
    local job = redis.pcall('HMGET', job_key(id), 'status', 'worker_name')
    local worker = redis.pcall('HGET', rq .. ':execution:' .. runs[i], 'worker_name')
    if type(worker) ~= 'string' then worker = job[2] or '' end
    forget(worker, queue, id, execution)
    if job[1] == 'started' and not is_leased(queue, id) then
      requeue(queue, id, ARGV[3])
      back[#back + 1] = id
    end
  end
end
return back
"""
)

# ARGV: rq, worker, then (queue, id, execution, deaths) for each lease. Noted in the jobs that are still ours.
NOTE_DEATHS = (
    _LEASE
    + """
for i = 3, #ARGV, 4 do
  if owns(ARGV[2], ARGV[i], ARGV[i + 1], ARGV[i + 2]) then
    redis.call('HSET', job_key(ARGV[i + 1]), 'livebatch_deaths', ARGV[i + 3])
  end
end
"""
)

# ARGV: rq, then commands: the number of words of each, and the words. Returns their answers, also errors: one
# that fails keeps no other from being run.
COMMANDS = (
    _LEASE
    + """
local answers, at = {}, 2
while at < #ARGV do
  answers[#answers + 1] = redis.pcall(unpack(ARGV, at + 1, at + ARGV[at]))
  at = at + 1 + ARGV[at]
end
return answers
"""
)
