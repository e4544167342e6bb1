"""``neuron-accel env`` prints a complete report without secrets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import zipfile

import pytest

from neuron_accel.cli.bundle import Redactor
from neuron_accel.cli.env import collect, describe_torch_neuronx, relevant_variables
from neuron_accel.cli.main import main
from neuron_accel.neuron.facts import SDK


def test_the_report_names_versions_backend_and_plugins(capsys):
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["neuron-accel"] == importlib.metadata.version("neuron-accel")
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["system"]["cores"] >= 1
    assert "zero1" in {plugin["name"] for plugin in report["plugins"]}
    assert report["backend"]["reason"]


def test_the_text_has_everything_that_the_json_has(capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for title in ("versions", "system", "backend", "environment", "plugins"):
        assert f"{title}\n" in text
    assert importlib.metadata.version("accelerate") in text
    assert f"Neuron SDK {SDK} of " in text


def test_the_backend_follows_the_environment_it_is_asked_about():
    assert collect({"ACCELERATE_USE_CPU": "1"})["backend"]["device"] == "cpu"
    assert "zla" in collect({"NEURON_ACCEL_BACKEND": "zla"})["backend"]["error"]


def test_variables_are_the_relevant_ones_without_secrets():
    environment = {
        "NEURON_CC_FLAGS": "--model-type transformer",
        "OMP_NUM_THREADS": "2",
        "USE_TORCH_XLA": "false",
        "HOME": "/home/somebody",
        "ACCELERATE_API_KEY": "hunter2",
        "NEURON_ACCESS_TOKEN": "hunter2",
        "XLA_CLIENT_SECRET": "hunter2",
        "SLURM_PASSWORD": "hunter2",
        "NEURON_COMPILE_CACHE_URL": "https://me:hunter2@example.com/cache",
        "MASTER_PORT": "29500",
        "NEURON_NO_TEXT": os.fsdecode(b"a\xff"),
    }
    shown = relevant_variables(environment)
    assert shown["NEURON_NO_TEXT"] == "a\\xff"
    assert "hunter2" not in json.dumps(shown)
    assert "HOME" not in shown
    assert shown["NEURON_CC_FLAGS"] == "--model-type transformer"
    assert shown["NEURON_COMPILE_CACHE_URL"] == "https://***@example.com/cache"
    assert shown["NEURON_ACCESS_TOKEN"] == "(set; not shown)"
    assert {"OMP_NUM_THREADS", "USE_TORCH_XLA", "MASTER_PORT"} <= set(shown)


@pytest.mark.parametrize(
    ("version", "groups", "words"),
    [
        ("1.0", set(), "placeholder"),
        ("2.9.0.2.15.32035", set(), "(XLA)"),
        ("2.13.3.0", {"torch.backends"}, "native"),
    ],
)
def test_the_packages_called_torch_neuronx_are_told_apart(version, groups, words):
    text = describe_torch_neuronx(version, groups)
    assert text.startswith(version)
    assert words in text


# ---- a bundle for a support ticket -----------------------------------------------------------------------------------
SECRETS = {
    "HF_TOKEN": "hf_ThisIsNotARealTokenAtAll",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCY",
    "WANDB_API_KEY": "0123abcd4567ef89",
    "NEURON_SOME_PASSWORD": "correct horse",
    "NEURON_COMPILE_CACHE_URL": "https://me:swordfish@example.com/cache",
}
LOG = """\
step 1, tokens: 4096, max_new_tokens=8
logging in with 0123abcd4567ef89 and wJalrXUtnFEMI/K7MDENG+bPxRfiCY
{"api_key": "of-a-file", "lr": 0.1} aws_secret_access_key = inAFile password='p q r'
git clone https://me:open-sesame@example.com/repo
AKIAIOSFODNN7EXAMPLE ghp_0123456789abcdefghijklmnop
-----BEGIN RSA PRIVATE KEY-----
MIIEow
-----END RSA PRIVATE KEY-----
"""
IN_FILES = ("of-a-file", "inAFile", "p q r", "open-sesame", "AKIAIOSFODNN7EXAMPLE", "ghp_01234567", "MIIEow")


def test_a_bundle_has_what_a_ticket_asks_for_and_no_secret(tmp_path, monkeypatch, capsys):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    logs = tmp_path / "logs"
    (logs / "inner").mkdir(parents=True)
    (logs / "inner" / "rank-0.log").write_text(LOG)
    (logs / "weights.bin").write_bytes(b"\0" * 100)
    (tmp_path / "plan.json").write_text('{"rank": 0}')
    path = tmp_path / "ticket.zip"
    command = ["env", "--bundle", str(path), "--include", str(logs), "--include", str(tmp_path / "plan.json")]
    assert main(command) == 0
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name).decode() for name in archive.namelist()}
    expected = {"env.txt", "env.json", "packages.txt", "compile_cache.txt", "files/plan.json"}
    assert expected | {"files/logs/inner/rank-0.log"} <= set(found)
    assert not any("weights" in name for name in found)
    assert f"torch=={importlib.metadata.version('torch')}" in found["packages.txt"]
    assert json.loads(found["env.json"])["network"]
    log = found["files/logs/inner/rank-0.log"]
    assert "step 1, tokens: 4096, max_new_tokens=8" in log
    assert '"lr": 0.1' in log
    everything = "\n".join(found.values()) + capsys.readouterr().out
    for secret in (*list(SECRETS.values())[:4], "swordfish"):
        assert secret not in everything
    for secret in IN_FILES:
        assert secret not in log


def test_a_bundle_needs_files_that_exist_and_a_place(tmp_path, capsys):
    assert main(["env", "--bundle", str(tmp_path / "a.zip"), "--include", str(tmp_path / "nothing")]) == 2
    assert main(["env", "--include", str(tmp_path)]) == 2
    assert main(["env", "--bundle", str(tmp_path / "nowhere" / "a.zip")]) == 2
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err.count("error:") == 3


@pytest.mark.parametrize(
    "line",
    [
        "SLURM_JWT=eyJhbGciOi.eyJleHAiOjE3.abc-def_12",
        "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz",
        "Authorization: Bearer abc123.def456 and more",
        "{'Authorization': 'Basic abc123def456'}",
        "X-Auth-Token: abc123def456",
        "got eyJhbGciOi.eyJleHAiOjE3.abc-def_12 from it",
        "glpat-abc123def456ghi789jk",
        "--password abc123def456 --lr 1",
        "--api-key=abc123def456",
        "password: abc123 def456 staple",
        "MY_JWT=abc123def456",
        "https://b.s3/x?X-Amz-Signature=abc123def456&y=1",
    ],
)
def test_tokens_of_known_forms_are_removed(line):
    shown = Redactor({})(line)
    assert not any(part in shown for part in ("abc123", "def456", "eyJ", "_11ABC", "staple")), shown
    assert "(not shown)" in shown
    assert Redactor({})(shown) == shown


def test_only_listed_variables_are_printed():
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "eyJ",
        "SLURM_SPANK_X": "y",
        "HOME": "/h",
        "PWD": "/w",
        "NCCL_DEBUG": "INFO",
    }
    assert relevant_variables(environ) == {"SLURM_JOB_ID": "7", "NCCL_DEBUG": "INFO"}
    assert Redactor({"PWD": "/work", "DB_PWD": "hunter2"})("in /work with hunter2") == "in /work with (not shown)"
    assert Redactor({})("tokens: 512, key value heads: 4, author: me") == "tokens: 512, key value heads: 4, author: me"
