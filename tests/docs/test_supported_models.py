"""The tables of families, and what counts as tried."""

from __future__ import annotations

from tests.sweeps.families import table


def test_what_no_tiny_model_could_be_built_of_was_not_tried():
    layouts = ["tp2", "tp2+sp"]
    results = {
        "llama": {"tp2": "ok", "tp2+sp": "ok"},
        "deepseek_v4": {"tp2": "ok", "tp2+sp": "UnsupportedModelError: along the sequence"},
        "gemma3": dict.fromkeys(layouts, "not built tiny: 4,971,331,952 parameters"),
        "zamba": dict.fromkeys(layouts, "does not train tiny in one process: KeyError: 1"),
    }
    text = table(results, layouts)
    assert "1 of 2 families that were tried pass every layout, 2 at least one; 2 were not tried." in text
    assert "| llama | yes | yes |  |" in text
    assert "| deepseek_v4 | yes | no | UnsupportedModelError: along the sequence |" in text
    assert "| gemma3 | not tried | not tried | not built tiny: 4,971,331,952 parameters |" in text
    assert "| zamba | not tried | not tried |" in text
