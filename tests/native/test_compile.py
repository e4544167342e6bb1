"""torch.compile on the stand-in for the native device: right numbers, and no compilation for each step."""

from __future__ import annotations

import pytest

from tests.distributed.loop.test_compile import COMPOSITIONS, check, check_communication

SLOW = ("zero1-recompute", "pp2")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "composition", ["dp2-flash", "tp2-sp", *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)]
)
def test_a_compiled_model_trains_like_one_process(composition):
    sends = composition.startswith("pp")
    graphs = check(COMPOSITIONS[composition], "after", "native-p2p" if sends else "native")
    if composition == "dp2-flash":
        assert graphs == [2, 2], (
            "the model's hook before buffers are sent, and the model, in which ranks do not communicate"
        )


def test_a_graph_ends_at_a_collective():
    check_communication("native")
