"""The comparison with published runs in the guide is that of the data."""

from __future__ import annotations

import pytest

from tests.guests import is_installed


@pytest.mark.skipif(not is_installed("neuron-accel-plan"), reason="needs neuron-accel-plan")
def test_the_table_of_the_guide_is_that_of_the_data():
    from benchmarks import published

    page = published.PAGE.read_text(encoding="utf-8")
    assert page.partition(published.BEGIN)[2].partition(published.END)[0] == published.table()
