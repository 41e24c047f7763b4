"""The allow-list: is this job one of ours, and what does it ask for? Nothing in Redis is trusted.

Owns what is refused. A job is only read: its function is compared, never looked up, and no callback, webhook
or pickle of it is touched. Must not know models or how a row is run.
"""

from __future__ import annotations

import json
import time
import zlib
from dataclasses import replace
from typing import Any

from producer.errors import RowError, WireError
from producer.wire import FUNCTION, Failure, Request, Result, parse_job_id
from worker.leases import Claim

MAX_BYTES = 80 << 20  # of one job's payload, packed or unpacked: more than any line a producer accepts
RUNNABLE = (b"queued", b"started")  # started: its worker died and somebody queued it again


def read(claim: Claim) -> Request | Result:
    """What the job asks for; or the result it fails with, when it is not ours or breaks the contract."""
    custom_id = claim.lease.job_id
    try:
        _check(claim)
        payload = _payload(claim.data)
        custom_id = _custom_id(payload, custom_id)
        request = Request.decode(payload)
        if request.job_id != claim.lease.job_id:
            raise WireError(f"its payload belongs to row {request.job_id}")
        return request
    except WireError as error:
        return failed(custom_id, claim.lease.job_id, Failure.of("invalid_request", f"refused: {error}"))
    except RowError as error:
        return failed(custom_id, claim.lease.job_id, Failure.from_error(error))


def failed(custom_id: str, job_id: str, failure: Failure) -> Result:
    """The result of a row that has no answer."""
    failure = at_its_line(job_id, failure)
    return Result(custom_id=custom_id, job_id=job_id, created=int(time.time()), failure=failure)


def at_its_line(job_id: str, failure: Failure) -> Failure:
    """The failure, its message beginning with the row's line, unless it is the batch's doing."""
    try:
        _, _, line = parse_job_id(job_id)
    except WireError:  # no row of ours
        return failure
    if failure.status_code is None:
        return failure
    return replace(failure, message=f"line {line}: {failure.message}")


def _check(claim: Claim) -> None:
    """Raise WireError for everything of the hash that no job of ours carries."""
    if claim.status not in RUNNABLE:
        raise WireError(
            f"a job in the queue cannot have the status {claim.status.decode(errors='replace')!r}"
        )
    if claim.success_callback or claim.failure_callback or claim.stopped_callback:
        raise WireError("callbacks are not allowed")
    if claim.webhooks:
        raise WireError("webhooks are not allowed")
    if claim.repeats_left or claim.rate_limit:
        raise WireError("repeats and rate limits are not supported")
    if claim.data.isdigit() and len(claim.data) < 20:  # more are a payload, and none of ours
        raise WireError(f"its payload of {int(claim.data):,} bytes is larger than the {MAX_BYTES:,} allowed")


def _payload(data: bytes) -> Any:
    """The one argument of a call of ours. Raises WireError for any other call and for what is no call."""
    try:
        call = json.loads(_inflate(data))
    except (zlib.error, ValueError, RecursionError) as error:
        raise WireError("its payload is not JSON as livebatch writes it") from error
    if not isinstance(call, list) or len(call) != 4:
        raise WireError("its payload is not a call")
    function, instance, arguments, keywords = call
    if function != FUNCTION:
        raise WireError(f"the function {str(function)[:100]!r} is not allowed, only {FUNCTION!r}")
    if instance is not None or keywords or not isinstance(arguments, list) or len(arguments) != 1:
        raise WireError(f"{FUNCTION!r} takes one request and nothing else")
    return arguments[0]


def _inflate(data: bytes) -> bytes:
    """zlib, but never more than MAX_BYTES: a few kilobytes can unpack to gigabytes."""
    if not data:
        raise WireError("it has no payload")
    inflater = zlib.decompressobj()
    plain = inflater.decompress(data, MAX_BYTES)
    if inflater.unconsumed_tail:
        raise WireError(f"its payload unpacks to more than the {MAX_BYTES:,} bytes allowed")
    if not inflater.eof:
        raise WireError("its payload is cut short")
    return plain


def _custom_id(payload: Any, job_id: str) -> str:
    """The name to report a bad row by: its own where it has a sound one and the payload is the row's."""
    if not isinstance(payload, dict):
        return job_id
    given, identity = payload.get("custom_id"), [payload.get(key) for key in ("batch_id", "file", "line")]
    is_sound = isinstance(given, str) and 0 < len(given) <= 512 and given.isprintable()
    return str(given) if is_sound and "-".join(map(str, identity)) == job_id else job_id
