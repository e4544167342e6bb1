"""The page of errors has the messages that are raised."""

from __future__ import annotations

import re

import pytest

from docs.messages import GAP, messages, rows
from neuron_accel import NeuronAccelError, Zero1Plugin
from neuron_accel.engine.plan.config import load_config


def found(error: BaseException) -> bool:
    """Whether a message of the page, with values in its gaps, is that of an error."""
    said = str(error).splitlines()[0]
    listed = [message.what for message in messages() if message.error == type(error).__name__]
    return any(re.fullmatch(".*".join(map(re.escape, what.split(GAP))), said) for what in listed)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: load_config({"plugins": {"zero1": {}}}),
        lambda: load_config({"gradient_accumulation_steps": 0}),
        lambda: load_config({"plugins": ["zero"]}),
        lambda: Zero1Plugin(bucket_cap_mb=-1),
    ],
)
def test_a_message_is_on_the_page(mistake):
    with pytest.raises(NeuronAccelError) as caught:
        mistake()
    assert found(caught.value), caught.value


def test_a_message_that_is_computed_is_not_a_row_of_gaps():
    assert len(messages()) > 500
    assert [message for message in messages() if not message.what.strip(f"{GAP} .")] == []


def test_rows_are_one_line_each_and_escaped():
    text = rows("ConfigurationError", messages())
    assert all(line.count(" | ") == 1 for line in text.splitlines())
    assert rows("NoSuchError", messages()) == ""
