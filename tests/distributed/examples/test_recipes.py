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
OWN_MODULES = ("table", "data", "train")


@pytest.fixture
def make(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in OWN_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield runpy.run_path(str(FOLDER / "make.py"))
    for name in OWN_MODULES:
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
    assert predicted.keys() == recipes.keys()
    assert [name for name, found in predicted.items() if found["of"] != make["counted_as"](recipes[name])] == []
    tight = {name: found for name, found in predicted.items() if found["memory"] > 0.9 * found["core"]}
    assert list(tight) == ["llama-3.1-70b/pretrain-trn2.48xlarge-tp4-fsdp16-hybrid"]
    (found,) = tight.values()
    left = 1 - found["memory"] / found["core"]
    page = (FOLDER.parents[1] / "docs" / "recipes.md").read_text()
    assert f"it leaves {left:.0%} of a core" in " ".join(page.split())


def test_a_prediction_is_what_is_counted_today(make):
    """Of the recipe that is counted fastest."""
    pytest.importorskip("neuron_accel_plan", reason="neuron-accel-plan is not installed")
    name = "gemma-3-1b/lora-trn2.48xlarge"
    (recipe,) = (recipe for recipe in make["RECIPES"] if f"{recipe.model}/{recipe.name}" == name)
    assert make["count"](recipe) == json.loads((FOLDER / "predicted.json").read_text())[name]


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
    done = subprocess.run([*programs[program], *words], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_loads(folder, name):
    from transformers import AutoModelForCausalLM

    assert type(AutoModelForCausalLM.from_pretrained(folder)).__name__ == name


def train(recipe, arguments, ranks):
    run_ranks(run_script, ranks, str(FOLDER / "train.py"), [str(recipe), *arguments], timeout=100)


def ranks_of(text):
    """As many as tensor parallelism needs beside a pipeline, experts in parallel, or shards of a hybrid."""
    return 4 if re.search("pipeline_parallel_size|expert_parallel_size|hybrid_shard_size", text) else 2


@pytest.mark.parametrize("recipe", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_tiny_recipe_has_all_strategies_of_the_recipe(recipe, make):
    import yaml
    from train import Recipe

    plugins = Recipe.read(recipe).tiny(ranks_of(recipe.read_text())).accelerator["plugins"]
    degrees = {name: size for each in plugins if isinstance(each, dict) for name, size in sizes_of(each).items()}
    given = yaml.safe_load(recipe.read_text())["accelerator"]["plugins"]
    assert [*map(name_of, plugins)] == [*map(name_of, given)]
    assert set(degrees.values()) <= {2}, degrees


def name_of(plugin):
    return plugin if isinstance(plugin, str) else next(iter(plugin))


def sizes_of(plugin):
    (options,) = plugin.values()
    return {name: size for name, size in options.items() if name.endswith("_parallel_size") and size}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("models/*.json")), ids=lambda path: path.stem)
def test_a_tiny_model_has_a_layer_of_each_kind(path, make):
    from train import tiny_config
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    kinds = getattr(config, "layer_types", None) or []
    assert set(getattr(tiny_config(config), "layer_types", None) or []) == set(kinds)


@pytest.mark.parametrize("recipe", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_trains_a_tiny_model(recipe, tmp_path):
    text = recipe.read_text()
    for word, package in PACKAGES.items():
        if f"- {word}:" in text and not is_installed(package):
            pytest.skip(f"{package} is not installed")
    train(recipe, ["--tiny", f"--output={tmp_path}"], ranks=ranks_of(text))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 6
    assert all(map(math.isfinite, result["losses"]))
    assert result["losses"][-1] < result["losses"][0]
    made = "adapter/adapter_model" if "- lora:" in text else "model/model"
    assert (tmp_path / f"{made}.safetensors").is_file()
    if "- lora:" not in text:
        assert_serves(tmp_path / "model")


def assert_serves(folder):
    """Whether a server finds the class of the model, and uses its cache."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config, generation = AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    assert config.architectures == [type(AutoModelForCausalLM.from_pretrained(folder)).__name__]
    assert False not in (getattr(config, "use_cache", True), generation.use_cache)


def test_an_adapter_is_extracted_from_a_checkpoint_as_the_pages_say(tmp_path, make, monkeypatch):
    """The commands and the code of both pages, on a checkpoint of a tiny model."""
    if not is_installed("neuron-accel-lora"):
        pytest.skip("neuron-accel-lora is not installed")
    import torch
    from safetensors.torch import load_file
    from train import Recipe, build

    from neuron_accel.cli.main import main
    from neuron_accel.lazy import materialize

    docs = FOLDER.parents[1] / "docs"
    pages = [(docs / page).read_text() for page in ("recipes.md", "guides/from-an-empty-account.md")]
    blocks = [re.findall(r"```py\n(.*?)```", page, re.DOTALL) for page in pages]
    code, again = (next(block for block in found if "extract_adapter" in block) for found in blocks)
    assert code == again
    (path,) = re.findall(r'Path\("(.*?)"\)', code)
    recipe = FOLDER / path
    train(recipe, ["--tiny", f"--output={tmp_path / 'out'}"], ranks=2)
    expected = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    shutil.rmtree(tmp_path / "out" / "adapter")
    assert (
        main(["consolidate", "-q", str(tmp_path / "out" / "checkpoints" / "checkpoint_1"), str(tmp_path / "model")])
        == 0
    )
    base = build(Recipe.read(recipe), None, tiny=True)
    materialize(base)
    base.save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    recipe_here = tmp_path / path
    recipe_here.parent.mkdir()
    recipe_here.write_text(recipe.read_text())
    exec(code, {})
    found = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# ---- tokens ----------------------------------------------------------------------------------------------------------
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} end {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def data(make):
    import data

    return data


def tokenizer(*, begins=False):
    """``begins``: whether it puts a begin-of-text token before a text, as those of Llama and Gemma do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["pad", "end", "user", "assistant", *(f"w{number}" for number in range(100))]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="pad"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        inner.post_processor = processors.TemplateProcessing(single="w99 $A", special_tokens=[("w99", 103)])
    of_texts = {"bos_token": "w99", "eos_token": "end"}
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="pad", pad_token="pad", **of_texts)
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


def test_a_text_begins_as_the_tokenizer_lets_it(data, tmp_path):
    """Packed texts and prompts begin with the token that a server puts before them; a chat template writes its own."""
    text = written(tmp_path / "texts.jsonl", [{"text": "w1 w2"}, {"text": "w3 w4"}])
    assert data.write(tokenizer(begins=True), [text], 4, tmp_path / "texts") == 2
    assert [row["input_ids"].tolist() for row in data.Rows(tmp_path / "texts", 4)] == [[103, 5, 6, 1], [103, 7, 8, 1]]
    pair = written(tmp_path / "pairs.jsonl", [{"prompt": "w1 ", "completion": "w2 "}])
    data.write(tokenizer(begins=True), [pair], 4, tmp_path / "pairs")
    (row,) = data.Rows(tmp_path / "pairs", 4)
    assert row["input_ids"].tolist() == [103, 5, 6, 1]
    assert row["labels"].tolist() == [data.IGNORED, data.IGNORED, 6, 1]
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    data.write(tokenizer(begins=True), [written(tmp_path / "c.jsonl", [{"messages": chat}])], 8, tmp_path / "chats")
    (row,) = data.Rows(tmp_path / "chats", 8)
    assert row["input_ids"].tolist() == [2, 5, 1, 3, 6, 1, 1, 1]


def test_conversations_need_a_chat_template(data, tmp_path):
    of_a_base_model = tokenizer()
    of_a_base_model.chat_template = None
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    file = written(tmp_path / "chats.jsonl", [{"messages": chat}])
    with pytest.raises(data.DataError, match=r"line 1: .* no chat template .* 'prompt' and 'completion'"):
        data.write(of_a_base_model, [file], 8, tmp_path / "tokens")


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


def test_less_than_a_batch_of_data_is_refused(data, tmp_path, monkeypatch):
    """Instead of waiting for a first step for ever."""
    data.write(tokenizer(), [written(tmp_path / "texts.jsonl", [{"text": "w1 " * 95}])], 32, tmp_path / "tokens")
    recipe = FOLDER / "gemma-3-1b" / "pretrain-trn2.48xlarge.yaml"
    train = runpy.run_path(str(FOLDER / "train.py"))
    monkeypatch.setattr(sys, "argv", ["train.py", str(recipe), "--tiny", f"--data={tmp_path / 'tokens'}"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(data.DataError, match="has 3 samples, fewer than the 8 of a micro-batch on each of 1 "):
        train["main"]()


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
