"""The quickstart: its text and packing, and the whole main job at a tiny scale on several ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from neuron_accel.testing import run_ranks
from tests.guests import is_installed

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart"
DATA_PARALLEL = ("--config", str(QUICKSTART / "data_parallel.yaml"))


def load(name: str):
    """A module of the quickstart under a name of its own: `data` and `options` are names that others use as well."""
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


data, options, recipe, reference, report = map(load, ("data", "options", "recipe", "reference", "report"))


# ---- text ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def library(tmp_path):
    """A folder that looks like a standard library."""
    root = tmp_path / "lib"
    for i in range(40):
        path = root / ("package" if i % 2 else ".") / f"module_{i:02d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def function_{i}(argument):\n    return argument + {i}\n" * 5)
    return root


def test_sources_come_in_one_order_and_without_tests_and_packages(library):
    for name in ("site-packages/a.py", "test/b.py", "package/tests/c.py", "encodings/cp1.py", "test_d.py", "e.txt"):
        (library / name).parent.mkdir(exist_ok=True)
        (library / name).write_text("x = 1")
    names = [path.relative_to(library).as_posix() for path in data.find_sources(library)]
    assert names == sorted(names)
    assert len(names) == 40
    assert all("module_" in name for name in names)


def test_the_standard_library_is_found():
    names = {path.name for path in data.find_sources()}
    assert {"argparse.py", "dataclasses.py", "json", "decoder.py"} - names == {"json"}


def test_no_sources_is_an_error(tmp_path):
    with pytest.raises(data.CorpusError, match="no Python source"):
        data.find_sources(tmp_path)


def test_unreadable_files_are_skipped(library):
    everything = data.read_documents(share=1, held_out=0.2, root=library)
    (library / "latin.py").write_bytes("# Zürich\n".encode("latin-1"))
    (library / "empty.py").write_text("\n")
    (library / "gone.py").symlink_to(library / "nowhere.py")
    assert data.read_documents(share=1, held_out=0.2, root=library) == everything
    assert len(everything.train) + len(everything.held_out) == 40


def test_a_larger_share_only_adds_files_and_none_changes_sides(library):
    some = data.read_documents(share=0.5, held_out=0.3, root=library)
    everything = data.read_documents(share=1, held_out=0.3, root=library)
    assert 0 < len(some.train) < len(everything.train)
    assert set(some.train) < set(everything.train)
    assert set(some.held_out) < set(everything.held_out)
    assert not set(everything.train) & set(everything.held_out)


def test_a_split_with_an_empty_side_is_an_error(library):
    with pytest.raises(data.CorpusError, match="0 held out"):
        data.read_documents(share=1, held_out=1e-9, root=library)


@pytest.mark.parametrize(
    "wrong", [{"share": 0}, {"share": 1.1}, {"held_out": 1}, {"vocab_size": 256}, {"sequence_length": 1}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(data.CorpusError, match=str(next(iter(wrong.values())))):
        data.CorpusSettings(**wrong)


# ---- tokenizer and packing -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(["def f(self):\n        return self.value\n" * 20, "import os\n"], 270)


def test_any_text_survives_tokenizing(tokenizer):
    texts = ["def g():\n\treturn 'ü€😀'\r\n", "  a  b \n\n", f"x = '{data.END_OF_DOCUMENT}'"]
    for text, tokens in zip(texts, data.tokenize(texts, tokenizer), strict=True):
        assert tokenizer.decode(tokens) == text
        assert tokenizer.eos_token_id not in tokens, "text must not look like the end of a document"


def test_the_tokenizer_has_the_size_asked_for_and_opens_with_transformers(tokenizer, tmp_path):
    assert len(tokenizer) == 270
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(self):\n    return other.value"
    assert loaded(text)["input_ids"] == data.tokenize([text], tokenizer)[0]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token == data.END_OF_DOCUMENT


def test_too_little_text_for_a_vocabulary_is_an_error():
    with pytest.raises(data.CorpusError, match="only"):
        data.train_tokenizer(["ab"], 300)


def test_packing_keeps_every_token_in_order_and_marks_ends():
    rows = data.pack([[1, 2, 3], [], [4], [5, 6, 7, 8]], length=5, end=0)
    assert rows.tolist() == [[1, 2, 3, 0, 0], [4, 0, 5, 6, 7]]  # the incomplete [8, 0] is dropped
    assert rows.dtype == np.int32
    assert data.pack([], length=5, end=0).shape == (0, 5)


def test_sequences_are_their_own_labels():
    item = data.Sequences(np.array([[1, 2], [3, 4]], dtype=np.int32))[1]
    assert item["input_ids"].tolist() == item["labels"].tolist() == [3, 4]
    assert item["input_ids"].dtype == torch.int64


def test_spread_takes_rows_from_everywhere():
    assert data.spread(np.arange(10), 5).tolist() == [0, 2, 4, 6, 8]


# ---- cache -----------------------------------------------------------------------------------------------------------
SMALL = {"share": 1.0, "held_out": 0.3, "vocab_size": 280, "sequence_length": 8}


def same(a, b) -> bool:
    tokenizers = [x.tokenizer.backend_tokenizer.to_str() for x in (a, b)]
    return (
        np.array_equal(a.train, b.train) and np.array_equal(a.held_out, b.held_out) and tokenizers[0] == tokenizers[1]
    )


def test_the_cache_is_reused_and_holds_the_same(library, tmp_path):
    cache = tmp_path / "new" / "corpus.safetensors"
    made = data.load_corpus(data.CorpusSettings(**SMALL), cache, root=library)
    found = data.load_corpus(data.CorpusSettings(**SMALL), cache, root=library)
    assert (made.reused, found.reused) == (False, True)
    assert same(made, found)
    assert list(cache.parent.iterdir()) == [cache]


@pytest.mark.parametrize("changed", [{"vocab_size": 281}, {"sequence_length": 9}, {"held_out": 0.2}, {"share": 0.7}])
def test_the_cache_of_other_settings_is_replaced(library, tmp_path, changed):
    cache = tmp_path / "corpus.safetensors"
    data.load_corpus(data.CorpusSettings(**SMALL), cache, root=library)
    corpus = data.load_corpus(data.CorpusSettings(**SMALL | changed), cache, root=library)
    assert not corpus.reused
    assert corpus.train.shape[1] == (SMALL | changed)["sequence_length"]


def test_the_cache_of_another_text_is_replaced(library, tmp_path):
    cache = tmp_path / "corpus.safetensors"
    before = data.load_corpus(data.CorpusSettings(**SMALL), cache, root=library)
    path = data.find_sources(library)[0]
    path.write_text(path.read_text().replace("argument", "argumenu", 1))  # same length
    after = data.load_corpus(data.CorpusSettings(**SMALL), cache, root=library)
    assert not after.reused
    assert after.digest != before.digest


def test_a_damaged_cache_is_replaced(library, tmp_path):
    cache = tmp_path / "corpus.safetensors"
    made = data.load_corpus(data.CorpusSettings(**SMALL), cache, root=library)
    cache.write_bytes(cache.read_bytes()[:-5])
    again = data.load_corpus(data.CorpusSettings(**SMALL), cache, root=library)
    assert not again.reused
    assert same(made, again)


def test_an_interrupted_write_leaves_the_old_cache(library, tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "corpus.safetensors"
    data.load_corpus(data.CorpusSettings(**SMALL), cache, root=library)
    before = cache.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        data.load_corpus(data.CorpusSettings(**SMALL | {"vocab_size": 285}), cache, root=library)
    assert cache.read_bytes() == before
    assert list(cache.parent.iterdir()) == [cache]


def test_a_folder_that_cannot_be_written_is_an_error(library, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(data.CorpusError, match="cannot be written"):
        data.load_corpus(data.CorpusSettings(**SMALL), tmp_path / "file" / "corpus.safetensors", root=library)


# ---- order -----------------------------------------------------------------------------------------------------------
def test_the_order_passes_over_all_data_and_shuffles_each_pass():
    order = list(data.TrainingOrder(size=10, total=25, seed=3))
    passes = [order[:10], order[10:20], order[20:]]
    assert [sorted(p) for p in passes[:2]] == [list(range(10))] * 2
    assert len(order) == 25
    assert len(set(passes[2])) == 5
    assert passes[0] != passes[1]
    assert order == list(data.TrainingOrder(size=10, total=25, seed=3))
    assert order != list(data.TrainingOrder(size=10, total=25, seed=4))


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_the_reference_gets_what_all_ranks_see_in_a_step(ranks, accumulation):
    batch, steps = 8, 5
    samples = list(range(30))
    order = data.TrainingOrder(size=30, total=steps * batch, seed=0)
    sharded = [
        [
            value.tolist()
            for value in prepare_data_loader(
                DataLoader(samples, batch_size=batch // ranks // accumulation, sampler=order),
                num_processes=ranks,
                process_index=rank,
            )
        ]
        for rank in range(ranks)
    ]
    for step, whole in enumerate(DataLoader(samples, batch_size=batch, sampler=order)):
        micro_batches = range(step * accumulation, (step + 1) * accumulation)
        assert sorted(whole.tolist()) == sorted(v for m in micro_batches for rank in sharded for v in rank[m])
    assert all(len(rank) == steps * accumulation for rank in sharded)


# ---- recipe, reports, options ----------------------------------------------------------------------------------------
def test_the_learning_rate_rises_then_falls_to_the_floor():
    rates = [recipe.learning_rate_at(step, 100) for step in range(101)]
    peak = rates.index(max(rates))
    assert peak == 10
    assert rates[peak] == 1
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[0] > 0
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(recipe.FLOOR)


def test_only_matrices_decay():
    config = recipe.llama_config(
        vocab_size=32, hidden_size=16, layers=1, heads=2, key_value_heads=1, positions=8, end=0
    )
    model = recipe.build_model(config, 0)
    matrices, vectors = recipe.build_optimizer(model, 1e-3).param_groups
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}
    assert vectors["weight_decay"] == 0 < matrices["weight_decay"]
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_sparkline():
    assert report.sparkline([8, 7, 6, 5, 4, 3, 2, 1], encoding="utf-8") == "█▇▆▅▄▃▂▁"
    assert report.sparkline([2.0, 1.0], encoding="ascii") == "#_"
    assert report.sparkline([1.0, 1.0], encoding="utf-8") == "▁▁"
    assert len(report.sparkline(list(range(1000)), width=60, encoding="utf-8")) == 60


def test_loss_table_shows_first_and_last_and_differences():
    lines = report.loss_table([3.0, 2.0, 1.5], [3.0, 2.5, 1.5], rows=2).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["1", "3.00000", "3.00000", "0.0e+00"],
        ["3", "1.50000", "1.50000", "0.0e+00"],
    ]
    assert report.loss_table([3.0, 2.0, 1.5], [3.0, 2.5, 1.5]).splitlines()[2].split()[-1] == "-2.0e-01"
    assert len(report.loss_table([1.0]).splitlines()) == 2


def test_largest_difference():
    assert reference.largest_difference([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
    assert reference.largest_difference([1.0, float("nan")], [1.0, 1.0]) == float("inf")
    with pytest.raises(ValueError, match="zip"):
        reference.largest_difference([1.0], [1.0, 2.0])


def test_weights_are_part_of_the_verdict(tmp_path, capsys):
    config = recipe.llama_config(
        vocab_size=64, hidden_size=16, layers=1, heads=2, key_value_heads=2, positions=8, end=0
    )
    first, model = (recipe.build_model(config, 0) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    model.save_pretrained(tmp_path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert reference.weight_difference(tmp_path, weights, first.state_dict()).of_the_way == 0
    weights["lm_head.weight"][:16] += 0.005  # half of the way, in some of the entries
    found = reference.weight_difference(tmp_path, weights, first.state_dict())
    assert found.tensor == "lm_head.weight"
    assert 0.05 < found.of_the_way < 0.5
    assert not report.verdict(found.of_the_way, 1e-2, "weights: ")
    assert "ABOVE the tolerance of 1e-02" in capsys.readouterr().out
    del weights["lm_head.weight"]
    with pytest.raises(ValueError, match="names or shapes differ"):
        reference.weight_difference(tmp_path, weights, first.state_dict())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "--steps: 0 is not a positive number"),
        (["--learning-rate", "nan"], "nan is not a positive number"),
        (["--heads", "x"], "invalid int value: 'x'"),
        (["--hidden-size", "100"], "--hidden-size 100 must be a multiple of twice --heads 8"),
        (["--key-value-heads", "3"], "--heads 8 must be a multiple of --key-value-heads 3"),
        (["--stepz", "3"], "--stepz"),
    ],
)
def test_wrong_options_end_with_a_message(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse("", arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse("Trains.", ["--help"])
    assert ended.value.code == 0
    text = "".join(capsys.readouterr().out.split())  # help breaks lines, also within the path of a folder
    for name, value in vars(options.parse("", [])).items():
        assert f"--{name.replace('_', '-')}" in text
        assert "".join(f"(default: {value})".split()) in text


# ---- the main job, tiny ----------------------------------------------------------------------------------------------
TINY = (
    *("--steps", "8", "--layers", "1", "--hidden-size", "32", "--heads", "4", "--key-value-heads", "2"),
    *("--corpus-share", "0.03", "--held-out-share", "0.3", "--vocab-size", "270", "--sequence-length", "16"),
    *("--learning-rate", "0.01", "--eval-batches", "3"),
)


def main_job(arguments: list[str]) -> int | str | None:
    """On a rank: `python train.py ARGUMENTS`; the exit code, or the message it ends with."""
    sys.path.insert(0, str(QUICKSTART))
    sys.argv = [str(QUICKSTART / "train.py"), *arguments]
    import train

    try:
        return train.main()
    except SystemExit as ended:
        return ended.code


def train_tiny(folder: Path, ranks: int, *arguments: str) -> tuple[list[int | str | None], dict]:
    codes = run_ranks(main_job, ranks, [*TINY, "--output", str(folder), *arguments], timeout=100)
    return codes, json.loads((folder / "history.json").read_text())


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The main job as it is meant: four ranks, tensor and sequence parallel, ZeRO-1, compared with one process."""
    folder = tmp_path_factory.mktemp("quickstart")
    codes, history = train_tiny(folder, 4, "--verify")
    return folder, codes, history


def test_sharded_training_agrees_with_one_process(sharded):
    _, codes, history = sharded
    assert codes == [0, 0, 0, 0]
    assert history["reference"]["within_tolerance"]
    assert history["losses"] == pytest.approx(history["reference"]["losses"], rel=1e-5)
    assert history["reference"]["largest_norm_difference"] < 1e-4
    assert history["reference"]["weight_difference"] < 1e-3
    assert history["reference"]["largest_weight_difference"] < 1e-3


def test_the_loss_falls(sharded):
    _, _, history = sharded
    assert len(history["losses"]) == 8
    assert history["losses"][0] == pytest.approx(np.log(270), rel=0.1), "an untrained model knows nothing"
    assert history["losses"][-1] < history["losses"][0] - 0.3
    assert history["evaluation_loss"] < history["losses"][0] - 0.3


def test_the_saved_folder_opens_with_plain_transformers_and_is_the_trained_model(sharded):
    folder, _, history = sharded
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model, info = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(info.values()), f"keys missing, left over or of another shape: {info}"
    assert type(model).__name__ == "LlamaForCausalLM"
    settings = data.CorpusSettings(share=0.03, held_out=0.3, vocab_size=270, sequence_length=16)
    corpus = data.load_corpus(settings, folder / "corpus.safetensors")
    assert corpus.reused
    assert tokenizer("import os")["input_ids"] == corpus.tokenizer("import os")["input_ids"]
    rows = torch.from_numpy(data.spread(corpus.held_out, 3 * 8)).long()
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss.item()
    assert loss == pytest.approx(history["evaluation_loss"], rel=1e-5)
    line = report.complete_line(folder / "model", "import")
    assert line.startswith("import")
    assert "\n" not in line
    assert report.complete_line(folder / "model", "import " * 20) == "import " * 20


@pytest.mark.parametrize(("ranks", "config"), [(1, DATA_PARALLEL), (2, ()), (4, DATA_PARALLEL)])
def test_every_way_to_divide_gives_the_same_losses(sharded, ranks, config):
    folder, _, history = sharded
    codes, other = train_tiny(folder / f"{ranks}", ranks, *config)
    assert codes == [0] * ranks
    assert other["losses"] == pytest.approx(history["losses"], rel=1e-5)
    assert other["gradient_norms"] == pytest.approx(history["gradient_norms"], rel=1e-4)
    assert other["evaluation_loss"] == pytest.approx(history["evaluation_loss"], rel=1e-5)


@pytest.mark.skipif(not is_installed("neuron-accel-plan"), reason="the search is in neuron-accel-plan")
def test_the_layout_that_a_search_finds_gives_the_same_losses(sharded, monkeypatch):
    folder, _, history = sharded
    from neuron_accel.commands import plugin_classes

    searched = {cls.spec.name for cls in plugin_classes()} - {"zero1", "auto_layout", "data_parallel"}
    monkeypatch.setenv("NEURON_ACCEL_DISABLE_PLUGINS", ",".join(searched))  # few layouts to count
    codes, other = train_tiny(folder / "auto", 2, "--config", str(QUICKSTART / "auto.yaml"))
    assert codes == [0, 0]
    assert other["losses"] == pytest.approx(history["losses"], rel=1e-5)


def test_a_seed_gives_the_same_losses_to_the_last_bit_and_another_does_not(tmp_path):
    first, again, other = (
        train_tiny(tmp_path, 2, "--steps", "3", "--seed", seed)[1]["losses"] for seed in ("1", "1", "2")
    )
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_difference_above_the_tolerance_fails(tmp_path):
    codes, history = train_tiny(tmp_path, 4, "--verify", "--tolerance", "1e-15", "--steps", "4")
    assert codes == [1, 0, 0, 0]
    assert not history["reference"]["within_tolerance"]


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (4, ["--batch-size", "6"], "A batch of 6 sequences cannot be split into 4 equal parts"),
        (1, [], "1 rank cannot be divided into groups of 2"),
        (1, [*DATA_PARALLEL, "--corpus-share", "1e-9"], "0 files to train on"),
        (1, [*DATA_PARALLEL, "--batch-size", "100000"], "less than one batch of 100000"),
        (1, [*DATA_PARALLEL, "--vocab-size", "100"], "needs at least 257"),
        (1, ["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, ranks, arguments, message):
    codes = run_ranks(main_job, ranks, [*TINY, "--output", str(tmp_path), *arguments])
    assert all(str(code).startswith("error: ") and message in code for code in codes), codes


@pytest.mark.timeout(300)  # the only case that starts Python anew, three times, with all that has to be imported
def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(QUICKSTART / "train.py"), *TINY, "--output", str(tmp_path), "--verify", "--prompt", "class"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    with (tmp_path / "stdout").open("w+") as out, (tmp_path / "stderr").open("w+") as err:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks outlive a launcher that is killed
            process.wait()
    shown, progress = ((tmp_path / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
    assert code == 0, progress
    assert "largest relative difference of the losses in 8 steps" in shown
    assert "\n     prompt:     class\n     completion: " in shown
    assert "of the saved weights, relative to their change: " in shown
    assert shown.count("saved in") == 1, "one rank reports"
    assert "8/8" in progress
    assert "tokens/s" in progress
