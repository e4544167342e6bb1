"""``neuron-accel bundle`` writes what a support ticket asks for, without secrets."""

from __future__ import annotations

import importlib.metadata
import json
import zipfile

import pytest
from neuron_accel_report.bundle_command import Redactor

from neuron_accel.commands import main

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
    command = ["bundle", str(path), "--include", str(logs), "--include", str(tmp_path / "plan.json")]
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
    assert main(["bundle", str(tmp_path / "a.zip"), "--include", str(tmp_path / "nothing")]) == 2
    assert main(["bundle", str(tmp_path / "nowhere" / "a.zip")]) == 2
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err.count("error:") == 2


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


def test_what_is_no_secret_stays():
    assert Redactor({"PWD": "/work", "DB_PWD": "hunter2"})("in /work with hunter2") == "in /work with (not shown)"
    assert Redactor({})("tokens: 512, key value heads: 4, author: me") == "tokens: 512, key value heads: 4, author: me"
