"""The process that runs a script as one rank: as Python does, with three additions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from neuron_accel.launch import _rank


@pytest.fixture
def run_rank(tmp_path):
    def run(source, *arguments, kind="script", launcher=None, error_file=None):
        target = tmp_path / "folder" / "train_me.py"
        target.parent.mkdir(exist_ok=True)
        target.write_text(source)
        environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file or "")}
        name = str(target) if kind == "script" else target.stem
        command = [sys.executable, _rank.__file__, str(launcher or os.getpid()), kind, name]
        return subprocess.run(
            [*command, *arguments],
            cwd=target.parent if kind == "module" else None,
            env=environment,
            capture_output=True,
            text=True,
        )

    return run


SURROUNDINGS = """
import os, pickle, sys
class Sample:
    pass
assert __name__ == "__main__"
assert sys.argv[0].endswith(EXPECTED) and sys.argv[1:] == ["--epochs", "3"], sys.argv
assert os.path.basename(sys.path[0]) == "folder", sys.path[0]
assert pickle.loads(pickle.dumps(Sample())).__class__ is Sample
assert __file__.endswith("train_me.py")
assert not {"torch", "accelerate", "neuron_accel"} & set(sys.modules)
assert not any("cli" in os.path.basename(entry) for entry in sys.path), sys.path
import atexit
atexit.register(lambda: print("last words of", pickle.dumps(Sample())[:0], Sample.__name__))
print("fine")
"""


@pytest.mark.parametrize(("kind", "expected"), [("script", "train_me.py"), ("module", "train_me.py")])
def test_a_target_runs_as_under_python_itself(run_rank, kind, expected):
    done = run_rank(SURROUNDINGS.replace("EXPECTED", repr(expected)), "--epochs", "3", kind=kind)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["fine", "last words of b'' Sample"]


def test_workers_that_are_spawned_find_their_functions(run_rank):
    source = """
import multiprocessing
def square(number):
    return number * number
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3]))
"""
    done = run_rank(source)
    assert done.stdout == "[9]\n", done.stderr


def test_a_traceback_starts_in_the_script_and_is_written_down(run_rank, tmp_path):
    error_file = tmp_path / "error.json"
    done = run_rank("def f():\n    raise ValueError('boom')\nf()\n", error_file=error_file)
    assert done.returncode == 1
    assert "_rank.py" not in done.stderr
    assert done.stderr.splitlines()[1].endswith('train_me.py", line 3, in <module>')
    assert done.stderr.rstrip().endswith("ValueError: boom")
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "ValueError: boom"
    assert "line 2, in f" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) == int(message["extraInfo"]["time"]) > 1_000_000_000


def test_a_syntax_error_shows_the_line(run_rank):
    done = run_rank("x = (1,\n")
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
    assert "train_me.py" in done.stderr
    assert "_rank.py" not in done.stderr


def test_a_syntax_error_is_summed_up_as_one(run_rank, tmp_path):
    run_rank("x = = 1", error_file=tmp_path / "error.json")
    message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert message == "SyntaxError: invalid syntax (train_me.py, line 1)"


@pytest.mark.parametrize(
    ("source", "left"),
    [("x = 1", None), ("import sys\nsys.exit(0)", 2), ("import sys\ndef f(): sys.exit()\nf()", 2)],
)
def test_a_rank_that_ends_well_leaves_a_note(run_rank, tmp_path, source, left):
    before = time.time()
    assert run_rank(source, error_file=tmp_path / "error.json").returncode == 0
    note = json.loads((tmp_path / _rank.ENDED_FILE).read_text())
    assert before <= note["time"] <= time.time()
    assert note.get("left_at", "").endswith(f"train_me.py, line {left}" if left else "")


@pytest.mark.parametrize("source", ["import sys\nsys.exit(3)", "1 / 0", "import os\nos._exit(0)"])
def test_a_rank_that_does_not_end_well_leaves_none(run_rank, tmp_path, source):
    run_rank(source, error_file=tmp_path / "error.json")
    assert not (tmp_path / _rank.ENDED_FILE).exists()


def test_the_scripts_own_hook_for_exceptions_is_called(run_rank):
    done = run_rank("import sys\nsys.excepthook = lambda *args: print('hooked', args[1])\nraise ValueError('boom')")
    assert done.stdout == "hooked boom\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("statement", "code", "recorded"),
    [
        ("sys.exit(0)", 0, False),
        ("sys.exit()", 0, False),
        ("sys.exit(3)", 3, True),
        ("sys.exit('why')", 1, True),
        ("os._exit(4)", 4, False),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, False),
    ],
)
def test_exit_codes_are_the_scripts(run_rank, tmp_path, statement, code, recorded):
    error_file = tmp_path / "error.json"
    done = run_rank(f"import os, signal, sys\n{statement}\n", error_file=error_file)
    assert done.returncode == code
    assert error_file.exists() == recorded
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("end", ["1 / 0", "sys.exit(0)"])
def test_what_a_rank_writes_down_is_complete_once_it_is_there(run_rank, tmp_path, end):
    """Ends the rank when it gives the file its name."""
    dies = "lambda event, arguments: os._exit(9) if event == 'os.rename' else None"
    source = f"import os, sys\nsys.addaudithook({dies})\n{end}\n"
    assert run_rank(source, error_file=tmp_path / "error.json").returncode == 9
    assert {path.name for path in tmp_path.glob("*.json")} == {_rank.STARTED_FILE}


def test_a_crash_in_native_code_prints_the_python_stack(run_rank):
    done = run_rank("import os, signal\ndef crash():\n    os.kill(os.getpid(), signal.SIGSEGV)\ncrash()\n")
    assert done.returncode == -signal.SIGSEGV
    assert "line 3 in crash" in done.stderr


def test_a_rank_whose_launcher_is_gone_does_not_start(run_rank):
    done = run_rank("print('started')", launcher=1)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


@pytest.mark.parametrize(("statement", "code"), [("sys.exit(3)", 3), ("raise ValueError('boom')", 1)])
def test_a_disk_without_space_for_notes_changes_neither_the_exit_code_nor_the_error(run_rank, statement, code):
    done = run_rank(f"import sys\n{statement}\n", error_file="/dev/full/error.json")
    assert done.returncode == code
    assert ("ValueError: boom" in done.stderr) is (code == 1)
    assert "OSError" not in done.stderr


def test_a_rank_that_sigterm_ends_says_so(run_rank, tmp_path):
    """So that the launcher, which has sent it, does not report that the rank has left."""
    source = "import os, signal\ndef waits():\n    os.kill(os.getpid(), signal.SIGTERM)\nwaits()\n"
    assert run_rank(source, error_file=tmp_path / "error.json").returncode == -signal.SIGTERM
    assert "in waits" in (tmp_path / _rank.STOPPED_FILE).read_text()
    assert not (tmp_path / _rank.ENDED_FILE).exists()
