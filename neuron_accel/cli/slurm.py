"""Batch files for Slurm: one task for each machine, which starts the ranks there."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuron_accel.cli.cluster import JOB_PORTS
from neuron_accel.cli.launch_plan import DEFAULT_MASTER_PORT, LaunchPlan
from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.cache import HOST, is_s3

TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
# {purpose}
# Submit it from the folder that the script is to run in: sbatch {file}

set -euo pipefail

# the first machine of the job is where all meet; not a pipe into head, whose early end can fail the job
read -r master < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# a port of its own for every job, should two share a machine
port=$(({port} + SLURM_JOB_ID % {ports}))

# --kill-on-bad-exit: when one machine fails, the others end too
srun --kill-on-bad-exit=1 bash -c \\
  {task} neuron-accel \\
  --master-addr "$master" --master-port "$port" {arguments}
"""

TASK = 'exec {start} --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" "$@"'
LAUNCH = "neuron-accel launch"

LAST_PORT = 65535 - (JOB_PORTS - 1) - 2
"""Of those that ``--master-port`` may name: jobs add up to 999, and the heartbeat and Neuron's runtime take the two
after."""


@dataclass(frozen=True, kw_only=True)
class BatchFile:
    """A batch file, and what it is for."""

    path: Path
    text: str
    purpose: str


def own_root(cache: str | None) -> str | None:
    """The compile cache of each machine of a job: a separate folder below ``cache``, since all of them usually share
    the file system that a job is submitted from, and cannot share a cache there."""
    if not cache or is_s3(cache) or HOST in cache:
        return cache
    return os.path.join(cache, HOST)


def describe_batch_files(
    place: str, plan: LaunchPlan, options: Sequence[str], cache: str | None = None
) -> list[BatchFile]:
    """The batch file of a training and, where graphs are compiled ahead, that of its compile job.

    Args:
        place: where the training's goes, or a folder for both (``run.slurm`` and ``compile.slurm``).
        plan: the launch.
        options: of ``neuron-accel launch`` but for those that say which machine it is; then the script and its
            arguments.
        cache: the compile cache, for the tool that compiles; as among the options.

    Returns:
        In the order in which to submit them; the training's last.

    Raises:
        ConfigurationError: for no place, or a port that leaves none for every job.
    """
    port = plan.request.master_port or DEFAULT_MASTER_PORT
    if not place:
        raise ConfigurationError("No file is named.", where="--slurm", fix="name a file or a folder")
    if port > LAST_PORT:
        raise ConfigurationError(
            f"Port {port} is too high.",
            where="--master-port",
            why="each adds up to 999 to it, by its number, so that two jobs on a machine do not meet",
            fix=f"give at most {LAST_PORT}, or leave it out",
        )
    training, compilation = _paths(Path(place))
    kinds = [(training, LAUNCH, f"Trains {plan.request.target}.")]
    if plan.device != "neuron":
        purpose = f"Compiles the graphs of {plan.request.target} into the compile cache; on as many machines as train."
        precompile = f"neuron-accel precompile{f' --cache-dir={_quoted(cache)}' if cache else ''} -- {LAUNCH}"
        kinds.insert(0, (compilation, precompile, purpose))
    files = []
    for path, start, purpose in kinds:
        text = TEMPLATE.format(
            name=re.sub(r"[^\w.-]", "_", path.stem),
            nodes=plan.request.nnodes,
            purpose=purpose,
            file=shlex.quote(path.name),
            port=port,
            ports=JOB_PORTS,
            task=shlex.quote(TASK.format(start=start)),
            arguments=shlex.join(options),
        )
        files.append(BatchFile(path=path, text=text, purpose=purpose))
    return files


def _quoted(text: str) -> str:
    """For the shell; braces without a comma mean themselves there."""
    return text if re.fullmatch(r"[\w./:@%+={}-]+", text) else shlex.quote(text)


def _paths(path: Path) -> tuple[Path, Path]:
    if path.is_dir():
        return path / "run.slurm", path / "compile.slurm"
    return path, path.with_name(f"{path.stem}_compile{path.suffix}")


def write_batch_files(files: Sequence[BatchFile]) -> None:
    """Writes them, over earlier batch files only.

    Raises:
        ConfigurationError: if one cannot be written, or is something else.
    """
    for file in files:
        _check_place(file.path)
    for file in files:
        try:
            file.path.write_text(file.text)
            file.path.chmod(0o755)
        except OSError as error:
            raise ConfigurationError(
                f"{file.path} cannot be written: {error.strerror}.", where="--slurm", fix="name another file"
            ) from None


def _check_place(path: Path) -> None:
    """A slip of the keyboard (``--slurm train.py``) must not cost a script."""
    beginning = TEMPLATE.partition("{")[0]
    try:
        with path.open(errors="replace") as file:
            found = file.read(len(beginning))
    except OSError:  # there is none, or nothing can be written there either
        return
    if found and found != beginning:
        raise ConfigurationError(
            f"{path} exists, and was not written by this command.",
            where="--slurm",
            why="it would be overwritten",
            fix="name another file, or remove it",
        )
