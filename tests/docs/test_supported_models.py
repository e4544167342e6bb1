"""The tables of families, and what counts as tried."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from neuron_accel.testing.parity import loss_of
from tests.sweeps.families import POPULAR_HEAD, REPLICAS, TOO_LARGE, earlier, popular, table, write
from tests.sweeps.tiny import KINDS, tiny_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "supported_models.md"


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


def test_the_page_begins_with_the_popular_families_as_its_other_tables_have_them():
    first = PAGE.read_text().split("\n## ")[1]
    assert f"\n## {first}".strip() == popular(PAGE).strip()
    assert "| Llama 2, 3 | llama | yes | yes | yes |  | yes | yes | [yes](recipes.md) |" in first
    assert POPULAR_HEAD.strip() in popular(PAGE)


def test_a_few_families_replace_their_rows_only(tmp_path):
    page, layouts = tmp_path / "page.md", ["pp2"]
    write(page, table({"gpt2": {"pp2": "ok"}, "olmoe": {"pp2": "no plan"}}, layouts), layouts)
    write(page, table(earlier(page, layouts) | {"olmoe": {"pp2": "ok"}}, layouts), layouts)
    assert earlier(page, layouts) == {"gpt2": {"pp2": "ok"}, "olmoe": {"pp2": "ok"}}
    assert page.read_text().count("## Popular families") == 1


OF_KINDS = {
    "images": "vit",
    "images with text": "gemma3",
    "sequences to sequences": "t5",
    "speech to text": "whisper",
    "speech, aligned": "wav2vec2",
    "diffusion": "FluxTransformer2DModel",
}


def test_the_page_has_a_table_for_each_kind():
    assert OF_KINDS.keys() | {"text"} == KINDS.keys()
    for kind, family in OF_KINDS.items():
        assert set(earlier(PAGE, [*REPLICAS], kind)[family].values()) == {"ok"}, kind
        if kind != "diffusion":  # without a plan
            assert earlier(PAGE, ["tp2", "tp2+sp"], kind)[family]["tp2"] == "ok", kind


@pytest.mark.parametrize(("kind", "family"), OF_KINDS.items())
def test_every_parameter_of_a_tiny_model_trains(kind, family):
    model = tiny_model(family, kind).train()
    loss_of(model(**KINDS[kind].batch(model, torch.Generator().manual_seed(1)))).backward()
    assert sum(p.numel() for p in model.parameters()) < TOO_LARGE
    idle = [name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert all("masked_spec_embed" in name for name in idle), idle  # of masks, which are noise


def test_the_command_makes_the_table_of_every_kind():
    assert all(f'"{kind}"' in (PAGE.parents[1] / "noxfile.py").read_text() for kind in OF_KINDS)
