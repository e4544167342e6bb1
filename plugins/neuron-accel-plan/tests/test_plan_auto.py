"""``plugins="auto"``: the layout that a search finds trains like one process, is the same on all ranks, and is kept."""

from __future__ import annotations

import pytest
import torch
from neuron_accel_plan import auto
from neuron_accel_plan.candidates import offering
from neuron_accel_plan.ranks import CpuRanks, cpu_machine, used_part

from neuron_accel import NeuronAccelerator, find_instance
from neuron_accel.errors import ConfigurationError
from neuron_accel.testing import run_ranks

BATCH, SEQUENCE, STEPS = 4, 16, 3
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def configuration():
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=2, vocab_size=64, max_position_embeddings=32, initializer_range=0.1, **SIZE)


def few_plugins(*kept):
    """Environment in which a search has few layouts to count."""
    names = (cls.spec.name for cls in offering())
    return {"NEURON_ACCEL_DISABLE_PLUGINS": ",".join(name for name in names if name not in kept)}


def samples():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 64, (STEPS * BATCH, SEQUENCE), generator=generator)


def build():
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(configuration())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_with_one_process():
    model, optimizer = build()
    losses = []
    for ids in samples().split(BATCH):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(project, saves, **changed):
    """The losses of a training with whatever layout is found, and the layout."""
    asked = {"model": configuration(), "global_batch": BATCH, "sequence": SEQUENCE, "jobs": 1} | changed
    accelerator = NeuronAccelerator(config={"plugins": "auto"}, plan_for=asked, project_dir=project)
    calls = accelerator.num_processes * accelerator.gradient_accumulation_steps
    rows = [{"input_ids": ids, "labels": ids} for ids in samples()]
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH // calls)
    model, optimizer, loader = accelerator.prepare(*build(), loader)
    losses, within = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        within.append(accelerator.reduce(loss.detach(), "mean").item())
        if accelerator.sync_gradients:
            losses.append(sum(within) / len(within))
            within = []
    if saves:
        accelerator.save_state(f"{project}/last")
    plan = accelerator.plan
    accelerator.end_training()
    return losses, plan.to_dict()["plugins"]["auto_layout"]["config"], plan.to_dict()


@pytest.mark.timeout(300)
def test_two_ranks_train_like_one_process_and_resume_with_the_layout(tmp_path, capfd):
    env = few_plugins("zero1")
    first, second = run_ranks(train, 2, str(tmp_path), True, env=env, timeout=240)
    assert first[0] == pytest.approx(train_with_one_process(), rel=1e-5)
    assert first[1:] == second[1:]
    said = capfd.readouterr()
    said = " ".join((said.out + said.err).split())
    assert said.count('plugins="auto" is') == 1, said
    assert "the layout was chosen for" not in said  # no warning
    answer = first[1]["answer"]
    assert answer["layout"] in said
    assert "the fastest of" in said
    assert "2 CPU ranks" in said
    assert answer["parameters"] == sum(p.numel() for p in build()[0].parameters())

    # Who continues on as many ranks has the same layout and does not search, which this number of jobs would end.
    (_, kept, plan), _ = run_ranks(train, 2, str(tmp_path), False, jobs=-1, env=env)
    assert kept["answer"] == answer
    assert plan["mesh"] == first[2]["mesh"]
    said = capfd.readouterr()
    assert "of the checkpoint that this run continues" in " ".join((said.out + said.err).split())


def refused(asked, **others):
    try:
        NeuronAccelerator(plugins=["auto"], plan_for=asked, **others)
    except ConfigurationError as error:
        return str(error)
    return None


def test_what_cannot_be_seen_before_prepare_is_named_on_every_rank():
    first, second = run_ranks(refused, 2, {"global_batch": 8})
    assert first == second
    assert "does not know model, sequence" in first
    assert 'plan_for={"model": config, "global_batch": 64, "sequence": 4096}' in first


def test_the_search_chooses_micro_batches():
    asked = {"model": configuration(), "global_batch": 8, "sequence": 16}
    assert '=2 is given, and plugins="auto" chooses it' in refused(asked, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"global_bach": 3}, "Did you mean .global_batch"),
        ({"model": torch.nn.Linear(2, 2)}, "cannot plan a Linear"),
        ({"model": "no-such-model", "jobs": 1}, "There is no model no-such-model"),
    ],
)
def test_what_cannot_be_planned_is_refused(changed, message):
    asked = {"model": configuration(), "global_batch": 8, "sequence": 16}
    with pytest.raises(ConfigurationError, match=message):
        auto.choose(asked | changed, world_size=2, device="cpu", hardware=None)


def test_devices_without_figures_are_refused(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    asked = {"model": configuration(), "global_batch": 8, "sequence": 16}
    with pytest.raises(ConfigurationError, match="NEURON_ACCEL_INSTANCE"):
        auto.choose(asked, world_size=2, device="cuda", hardware=None)


def test_another_training_than_that_of_the_checkpoint_is_another_question(monkeypatch):
    """Neither other ranks nor another batch keep the layout."""
    searched = []
    answer = {"configuration": {"plugins": ["zero1"]}, "layout": "zero1", "rows": 4, "parameters": 5, "model": "M"}
    answer |= {"mesh": "dp 2", "seconds": [1.0, 0.5, 2.0], "memory": 1, "parts": {}, "others": [], "slower": 0}
    answer |= {"left": 0, "at_most_faster": 0.0}

    def search(question):
        searched.append(question)
        return answer | {"ruled_out": 0}

    monkeypatch.setattr(auto, "_search", search)
    asked = {"model": configuration(), "global_batch": 8, "sequence": 16}
    where = {"device": "cpu", "hardware": None}
    found = auto.choose(asked, world_size=2, **where)
    note = found["plugins"][-1]["auto_layout"]
    recorded = {"plugins": {"auto_layout": {"config": note}}}
    assert auto.choose(asked, world_size=2, recorded=recorded, **where)["plugins"][0] == "zero1"
    assert len(searched) == 1
    again = auto.choose(asked, world_size=4, recorded=recorded, **where)
    assert "for other ranks or another training" in again["plugins"][-1]["auto_layout"]["reasons"]
    auto.choose(asked | {"global_batch": 16}, world_size=2, recorded=recorded, **where)
    auto.choose(asked, world_size=2, recorded={"plugins": {"zero1": {}}}, **where)
    assert len(searched) == 4


@pytest.mark.parametrize(
    ("left", "more", "said"),
    [
        (0, 0.0, None),
        (7, 0.25, "of 8 layouts of M that may fit"),
        (7, 0.25, "7 were left when the search ended, at most 25.0% faster"),
        (7, None, "7 were left when the search ended, of unknown time"),
    ],
)
def test_the_reasons_say_what_was_left(monkeypatch, left, more, said):
    answer = {"configuration": {"plugins": ["zero1"]}, "layout": "zero1", "rows": 4, "parameters": 5, "model": "M"}
    answer |= {"mesh": "dp 2", "seconds": [1.0, 0.5, 2.0], "memory": 1, "parts": {}, "others": [], "slower": 0}
    answer |= {"ruled_out": 0, "left": left, "at_most_faster": more}
    asked = []
    monkeypatch.setattr(auto, "_search", lambda question: asked.append(question) or answer)
    training = {"model": configuration(), "global_batch": 8, "sequence": 16}
    found = auto.choose({**training, "within": 0}, world_size=2, device="cpu", hardware=None)
    auto.choose(training, world_size=2, device="cpu", hardware=None)
    assert [question["within"] for question in asked] == [None, 50.0]
    reasons = found["plugins"][-1]["auto_layout"]["reasons"]
    assert (said is None and "left" not in reasons) or said in reasons


@pytest.mark.parametrize("first", ["model", "loader"])
def test_another_model_or_batch_than_planned_is_warned_of(first, recwarn):
    planned = {"question": {"global_batch": 8}, "answer": {"parameters": 5, "configuration": {}}}
    accelerator = NeuronAccelerator(plugins=[auto.AutoLayout(**planned)])
    loader = torch.utils.data.DataLoader(torch.zeros(16, 2), batch_size=4)
    given = [loader, torch.nn.Linear(2, 2)]
    for each in given if first == "loader" else reversed(given):
        accelerator.prepare(each)
    texts = sorted(str(each.message) for each in recwarn if 'plugins="auto"' in str(each.message))
    assert len(texts) == 2
    assert "a model of 5 parameters, and this one has 6" in texts[0]
    assert "steps of 8 samples, and the first loader gives 4" in texts[1]
    accelerator.end_training()


def test_the_cores_of_an_instance_that_a_run_has():
    trn1 = find_instance("trn1.32xlarge")
    part, instances = used_part(trn1, 8, 1)
    assert (instances, part.hardware().full, part.hardware().model_groups) == (1, 8, (2, 4, 8))
    assert part.core_bytes() == trn1.core_bytes()
    assert used_part(trn1, 96, 1)[1] == 3
    single, _ = used_part(find_instance("trn2.48xlarge"), 128, 1)
    assert (single.hardware().full, single.core_bytes() * 128) == (128, 1536 << 30)
    with pytest.raises(ConfigurationError, match="start 32 or 64 ranks"):
        used_part(trn1, 40, 1)


def test_cpu_ranks_form_groups_of_every_size():
    hardware = CpuRanks(ranks=12, memory=1 << 30).hardware()
    assert hardware.model_groups == (2, 3, 4, 6, 12)
    assert all("assumed" in source for source in cpu_machine().sources().values())


def test_a_shallow_model_with_an_entry_for_each_block_is_searched_with_more_blocks():
    from neuron_accel_plan.layout import _with_depth
    from transformers import Qwen3Config

    deeper = _with_depth(Qwen3Config(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]), 4)
    assert deeper.layer_types == 2 * ["sliding_attention", "full_attention"]


def test_an_error_of_the_search_keeps_its_class():
    from neuron_accel.errors import PluginError

    with pytest.raises(PluginError, match="what") as raised:
        auto._raise({"kind": "PluginError", "what": "what", "where": None, "why": "why", "fix": None})
    assert "why: why" in str(raised.value)
