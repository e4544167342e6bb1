"""Recipes: their files are those of the table, and each trains a tiny model of its family."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_accel.testing import run_ranks
from tests.distributed.examples.test_examples import run_script
from tests.guests import is_installed

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "recipes"
FILES = sorted(FOLDER.glob("*/*.yaml"))
PACKAGES = {"lora": "neuron-accel-lora", "expert_parallel": "neuron-accel-expert-parallel"}


@pytest.fixture
def make(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("table", "data"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield runpy.run_path(str(FOLDER / "make.py"))
    for name in ("table", "data"):
        sys.modules.pop(name, None)


def test_files_are_those_of_the_table(make):
    written = make["files"]()
    assert [path.name for path, text in written.items() if not path.is_file() or path.read_text() != text] == []
    assert set(FILES) == {path for path in written if path.suffix == ".yaml"}
    assert sorted(FOLDER.glob("models/*.json")) == sorted(path for path in written if path.suffix == ".json")


def test_predictions_are_those_of_the_recipes(make):
    """A recipe that was changed has to be counted again, and fits; of the layouts that AWS publishes one is tight."""
    predicted = json.loads((FOLDER / "predicted.json").read_text())
    recipes = {f"{recipe.model}/{recipe.name}": recipe for recipe in make["RECIPES"]}
    assert predicted.keys() <= recipes.keys()
    assert [name for name, found in predicted.items() if found["of"] != make["counted_as"](recipes[name])] == []
    tight = {name: found for name, found in predicted.items() if found["memory"] > 0.9 * found["core"]}
    assert list(tight) == ["llama-3.1-70b/pretrain-trn2.48xlarge-tp4-fsdp16-hybrid"]
    (found,) = tight.values()
    left = 1 - found["memory"] / found["core"]
    page = (FOLDER.parents[1] / "docs" / "recipes.md").read_text()
    assert f"it leaves {left:.0%} of a core" in " ".join(page.split())


def test_published_layouts_decide_that_inputs_are_gathered_again():
    """Those that fit only so are named, with both figures, where the default is explained."""
    predicted = json.loads((FOLDER / "predicted.json").read_text())
    page = (FOLDER.parents[1] / "docs" / "tensor_parallel.md").read_text()
    said = page[page.index("### Gathering again") :].split("##")[1]
    compared = {
        name: found for name, found in predicted.items() if "trn1" in name and "memory_without_regather" in found
    }
    only = {name for name, found in compared.items() if found["memory_without_regather"] > 0.9 * found["core"]}
    assert (len(only), len(compared)) == (2, 4)
    for name in only:
        for figure in ("memory", "memory_without_regather"):
            assert f"{compared[name][figure] / 2**30:.1f}" in said, name


def test_models_have_their_published_sizes():
    """Parameters, in billions, of the cards of the models on the hub."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    published = {
        "llama-3.1-8b": 8.03,
        "llama-3.1-70b": 70.6,
        "llama-2-7b": 6.74,
        "llama-2-70b": 69.0,
        "moonlight-16b-a3b": 15.96,
        "qwen3-8b": 8.19,
        "qwen3-30b-a3b": 30.5,
        "gpt-oss-20b": 20.9,
        "gemma-3-1b": 1.0,
    }
    found = {}
    for path in FOLDER.glob("models/*.json"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        found[path.stem] = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert found == pytest.approx(published, rel=0.005)


def test_models_are_those_that_the_planner_knows_by_name():
    """Both lists have configurations of their own, and must not differ."""
    from transformers import AutoConfig

    known = pytest.importorskip("neuron_accel_plan.models", reason="neuron-accel-plan is not installed").known_models()
    both = known.keys() & {path.stem for path in FOLDER.glob("models/*.json")}
    assert len(both) >= 5
    for name in both:
        config = AutoConfig.from_pretrained(FOLDER / "models" / f"{name}.json")
        assert {key: getattr(config, key) for key in known[name]} == known[name], name


def test_from_the_front_page_to_a_recipe_that_is_planned_and_trained(tmp_path):
    """What the page of recipes, to which the front pages lead, tells a newcomer to type."""
    pytest.importorskip("neuron_accel_plan", reason="neuron-accel-plan is not installed")
    root = FOLDER.parents[1]
    assert all("recipes.md)" in (root / page).read_text() for page in ("README.md", "docs/index.md"))
    page = (root / "docs" / "recipes.md").read_text()
    (block,) = re.findall(r"## Try one in ten minutes\n.*?```console\n(.*?)```", page, re.DOTALL)
    install, enter, plan, launch = block.replace("\\\n", " ").splitlines()
    assert (install.split()[0], enter) == ("pip", "cd examples/recipes")
    planned = typed(plan)
    assert "predicted time of a step: " in planned
    assert " USD" in planned
    assert "fits: " in planned.splitlines()[-1]
    trained = typed(f"{launch} --output={tmp_path}")
    assert "tokens/s, loss" in trained
    assert_loads(tmp_path / "model", "Qwen3ForCausalLM")


def typed(command):
    """Runs a command of the page; returns what it prints."""
    program, *words = shlex.split(command)
    programs = {"python": [sys.executable], "neuron-accel": [sys.executable, "-m", "neuron_accel.cli.main"]}
    done = subprocess.run(
        [*programs[program], *words], cwd=FOLDER, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_loads(folder, name):
    from transformers import AutoModelForCausalLM

    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == name


def train(recipe, arguments, ranks):
    run_ranks(run_script, ranks, str(FOLDER / "train.py"), [str(recipe), *arguments], timeout=100)


@pytest.mark.parametrize("recipe", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_trains_a_tiny_model(recipe, tmp_path):
    text = recipe.read_text()
    for word, package in PACKAGES.items():
        if f"- {word}:" in text and not is_installed(package):
            pytest.skip(f"{package} is not installed")
    train(recipe, ["--tiny", f"--output={tmp_path}"], ranks=2)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 6
    assert all(map(math.isfinite, result["losses"]))
    assert result["losses"][-1] < result["losses"][0]
    made = "adapter/adapter_model" if "- lora:" in text else "model/model"
    assert (tmp_path / f"{made}.safetensors").is_file()


# ---- tokens ----------------------------------------------------------------------------------------------------------
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def data(make):
    import data

    return data


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["pad", "end", "user", "assistant", *(f"w{number}" for number in range(100))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="pad"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="pad", pad_token="pad", eos_token="end")
    made.chat_template = TEMPLATE
    return made


def written(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_texts_are_packed_without_padding(data, tmp_path):
    file = written(tmp_path / "texts.jsonl", [{"text": "w1 w2 w3"}, {"text": "w4 w5"}, {"text": "w6 w7 w8 w9"}])
    assert data.write(tokenizer(), [file], 4, tmp_path / "tokens") == 3
    rows = data.Rows(tmp_path / "tokens", 4)
    assert [row["input_ids"].tolist() for row in rows] == [[5, 6, 7, 1], [8, 9, 1, 10], [11, 12, 13, 1]]
    assert all(row["labels"].equal(row["input_ids"]) for row in rows)
    assert not rows.uneven


@pytest.mark.parametrize("form", ["messages", "prompt and completion"])
def test_of_a_conversation_the_last_answer_is_learnt(form, data, tmp_path):
    messages = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2"},
        {"role": "user", "content": "w3"},
        {"role": "assistant", "content": "w4 w5"},
    ]
    before = "user w1 end assistant w2 end user w3 end assistant "
    pair = {"prompt": before, "completion": "w4 w5 "}
    value = {"messages": messages} if form == "messages" else pair
    file = written(tmp_path / "chats.jsonl", [value, {"prompt": "w1 " * 20, "completion": "w2"}])
    assert data.write(tokenizer(), [file], 16, tmp_path / "tokens") == 1  # the other is too long
    (row,) = data.Rows(tmp_path / "tokens", 16)
    learnt = row["labels"] != data.IGNORED
    assert row["input_ids"][learnt].tolist() == row["labels"][learnt].tolist() == [8, 9, 1]
    assert row["input_ids"].tolist() == [2, 5, 1, 3, 6, 1, 2, 7, 1, 3, 8, 9, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1 is not JSON"),
        ('{"txt": "w1"}', "has none of 'text', 'messages'"),
        ('{"text": "w1"}', "less than one sample of 8 tokens"),
    ],
)
def test_a_file_that_cannot_be_used(line, says, data, tmp_path):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(data.DataError, match=says):
        data.write(tokenizer(), [tmp_path / "a.jsonl"], 8, tmp_path / "tokens")


def test_samples_of_another_length_are_refused(data, tmp_path):
    file = written(tmp_path / "texts.jsonl", [{"text": "w1 w2 w3"}])
    data.write(tokenizer(), [file], 4, tmp_path / "tokens")
    with pytest.raises(data.DataError, match="samples of 4 tokens, and the recipe 8"):
        data.Rows(tmp_path / "tokens", 8)


def test_a_recipe_continues_from_its_checkpoint(data, tmp_path):
    """On conversations, whose samples have different numbers of labels."""
    chats = [
        {"prompt": f"user w{n} ", "completion": " ".join(f"w{n + step}" for step in range(1, 2 + n % 5)) + " "}
        for n in range(64)
    ]
    data.write(tokenizer(), [written(tmp_path / "chats.jsonl", chats)], 32, tmp_path / "tokens")
    recipe = FOLDER / "llama-3.1-8b" / "pretrain-trn1.32xlarge.yaml"
    given = ["--tiny", f"--data={tmp_path / 'tokens'}"]
    full, again = tmp_path / "full", tmp_path / "again"
    train(recipe, [*given, f"--output={full}"], ranks=2)
    shutil.copytree(full / "checkpoints" / "checkpoint_0", again / "checkpoints" / "checkpoint_0")
    train(recipe, [*given, f"--output={again}"], ranks=2)
    results = [json.loads((folder / "result.json").read_text()) for folder in (full, again)]
    assert results[1]["losses"] == results[0]["losses"][3:]
    assert (again / "model" / "tokenizer.json").is_file()
