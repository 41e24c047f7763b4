"""What the contract lets through fits the sampler: a row at every limit is admitted, not fatal."""

from __future__ import annotations

import pytest

from kernels import cpu, reference
from kernels.packed import MAX_BIASES, MAX_ENDERS
from kernels.rows import RowParams
from producer import rules


@pytest.mark.parametrize("twin", [cpu, reference])
def test_a_row_at_the_limits_of_the_contract_is_admitted(twin: type) -> None:
    params = RowParams(
        max_tokens=1,
        eos_ids=tuple(range(MAX_ENDERS - rules.MAX_STOP_IDS)),
        stop_ids=tuple(range(1000, 1000 + rules.MAX_STOP_IDS)),
        logit_bias=tuple((token, 1.0) for token in range(rules.MAX_BIASES)),
    )
    twin.BatchedSampler(1, 4096, 16).admit(0, params, [1, 2])  # type: ignore[attr-defined]
    assert rules.MAX_BIASES <= MAX_BIASES
