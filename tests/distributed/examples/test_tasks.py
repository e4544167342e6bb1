"""The examples of classification, summarization and translation: tiny models on local files, on CPU ranks."""

from __future__ import annotations

import json
import runpy
import sys

import pytest
from tokenizers.processors import TemplateProcessing

from tests.distributed.examples.test_examples import EXAMPLES, run_script

FOLDER = EXAMPLES / "tasks"
SCRIPTS = ["run_classification", "run_image_classification", "run_summarization", "run_translation"]
COMMON = ["--do_train", "--do_eval", "--report_to=none", "--seed=1", "--save_strategy=no"]
PAIRS = ["--max_source_length=16", "--max_target_length=8", "--max_eval_samples=8", "--learning_rate=1e-2"]
WORDS = ["red", "green", "blue", "grey"]


def tokenizer(folder):
    sys.path.insert(0, str(EXAMPLES / "quickstart"))
    try:
        import data
    finally:
        sys.path.pop(0)
    made = data.train_tokenizer(["red green blue grey rot gruen blau grau " * 9], 275)
    end = made.eos_token
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, made.eos_token_id)]
    )
    made.save_pretrained(folder)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def t5(folder):
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer(folder)
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    T5ForConditionalGeneration(T5Config(vocab_size=275, dropout_rate=0.0, **sizes, **ids)).save_pretrained(folder)


def run_classification(folder):
    """Text of two columns, classes that are words."""
    from transformers import BertConfig, BertModel

    tokenizer(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=275, max_position_embeddings=16, **sizes)).save_pretrained(folder / "model")
    rows = [
        {"a": word, "b": WORDS[n % 2], "label": "same" if word == WORDS[n % 2] else "other"}
        for n in range(32)
        for word in WORDS
    ]
    return [
        f"--train_file={write(folder / 'train.jsonl', rows)}",
        f"--validation_file={write(folder / 'held_out.jsonl', rows[:11])}",
        "--text_column=a",
        "--second_text_column=b",
        "--max_length=16",
        "--learning_rate=3e-3",
        "--num_train_epochs=8",
    ]


def run_image_classification(folder):
    """A folder of images for each class."""
    from PIL import Image
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(folder / "model")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "model")
    for part, count in {"train": 32, "validation": 5}.items():
        for place, name in enumerate(("red", "blue")):
            (folder / "data" / part / name).mkdir(parents=True)
            for number in range(count):
                colour = [number] * 3
                colour[2 * place] = 200
                Image.new("RGB", (12, 12), tuple(colour)).save(folder / "data" / part / name / f"{number}.png")
    return [f"--dataset_name={folder / 'data'}", "--num_train_epochs=5", "--learning_rate=3e-3"]


def run_summarization(folder):
    """A summary is the first word; held out is a part of the file."""
    t5(folder / "model")
    rows = [
        {"text": f"{first} {second} {third}", "short": first} for first in WORDS for second in WORDS for third in WORDS
    ]
    data = ["--summary_column=short", f"--train_file={write(folder / 'train.jsonl', rows)}"]
    return [*data, *PAIRS, "--num_train_epochs=15", "--predict_with_generate"]


def run_translation(folder):
    t5(folder / "model")
    german = dict(zip(WORDS, ["rot", "gruen", "blau", "grau"], strict=True))
    rows = [{"translation": {"en": word, "de": german[word]}} for word in WORDS * 8]
    data = [f"--train_file={write(folder / 'train.jsonl', rows)}", f"--validation_file={folder / 'train.jsonl'}"]
    return [*data, *PAIRS, "--source_lang=en", "--target_lang=de", "--num_train_epochs=15", "--predict_with_generate"]


def in_its_cache(script, arguments, cache):
    import datasets

    datasets.config.HF_DATASETS_CACHE = cache  # not in the home directory; in a process of its own
    run_script(script, arguments)


MEASURES = {  # what each task measures, and what it reaches at least
    "run_classification": ("eval_accuracy", 0.9),
    "run_image_classification": ("eval_accuracy", 0.9),
    "run_summarization": ("eval_rougeL", 60),
    "run_translation": ("eval_chrf", 60),
}


@pytest.mark.parametrize("strategy", ["--zero_1", "--tensor_parallel_size=2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_task_is_learned(script, strategy, tmp_path):
    from transformers import AutoModel

    from neuron_accel.testing import run_ranks

    arguments = globals()[script](tmp_path)
    out = tmp_path / "out"
    if strategy.startswith("--tensor") and "--predict_with_generate" in arguments:
        arguments.append("--disable_sequence_parallel")  # T5's decoder attends to a sequence of another length
    arguments += [*COMMON, strategy, f"--model_name_or_path={tmp_path / 'model'}", f"--output_dir={out}"]
    run_ranks(in_its_cache, 2, str(FOLDER / f"{script}.py"), arguments, str(tmp_path / "cache"), timeout=100)
    measure, least = MEASURES[script]
    assert json.loads((out / "eval_results.json").read_text())[measure] >= least
    AutoModel.from_pretrained(out)


def test_what_the_measures_count():
    """chrF is the number of sacrebleu 2.6 for the same texts."""
    sys.path.insert(0, str(FOLDER))
    try:
        rouge_l = runpy.run_path(str(FOLDER / "run_summarization.py"))["rouge_l"]
        chrf = runpy.run_path(str(FOLDER / "run_translation.py"))["chrf"]
    finally:
        sys.path.pop(0)
    assert rouge_l(["a b c d", "x"], ["A c e", "x"]) == {"rougeL": pytest.approx(100 * (4 / 7 + 1) / 2)}
    assert rouge_l([""], ["a"]) == {"rougeL": 0.0}
    assert chrf([""], ["a"]) == {"chrf": 0.0}
    written, wanted = ["the cat sat on a mat", "no"], ["the cat is on the mat", "yes or no"]
    assert chrf(written, wanted) == {"chrf": pytest.approx(30.545459)}
