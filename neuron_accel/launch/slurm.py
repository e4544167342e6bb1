# SPDX-License-Identifier: Apache-2.0
"""Batch files for Slurm, with one task per machine, which starts the ranks of that machine."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuron_accel.errors import ConfigurationError
from neuron_accel.launch.cluster import JOB_PORTS
from neuron_accel.launch.plan import LaunchPlan
from neuron_accel.launch.request import DEFAULT_MASTER_PORT
from neuron_accel.neuron.cache import HOST, is_s3

TEMPLATE = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
{directives}# {purpose}
# Submit it from the working directory of the script: sbatch {file}

set -euo pipefail

# the rendezvous is on the first machine of the job; no pipe into head, whose early exit can fail the job
read -r master < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# different ports for jobs that share a machine
port=$(({port} + SLURM_JOB_ID % {ports}))

# when one machine fails, the others end by themselves, with its exit code; after --wait seconds Slurm ends them
srun --wait={wait} --export=ALL bash -c \\
  {task} neuron-accel \\
  --master-addr "$master" --master-port "$port" {arguments}{after}
"""

REQUEUE = """\
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@{seconds}
"""
AFTER = """ || status=$?
# SIGTERM ended it (143: before the time limit, or because the job was preempted), or a machine is lost (75)
case "${status:-0}" in
143|75)
  if [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then scontrol requeue "$SLURM_JOB_ID"
  else echo "the job was queued 100 times again, and is not any more; submit it again to continue" >&2; fi ;;
esac
exit ${status:-0}"""
ROOM_SECONDS = 30
"""Time between the end of ``--grace`` and the end of the job."""

TASK = 'exec {start} --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" "$@"'
LAUNCH = "neuron-accel launch"

LAST_PORT = 65535 - (JOB_PORTS - 1) - 1
"""Largest ``--master-port``: a job adds up to 999 to it, and the Neuron runtime uses the next port."""


@dataclass(frozen=True, kw_only=True)
class BatchFile:
    """A batch file and its purpose."""

    path: Path
    text: str
    purpose: str


def cache_per_host(cache: str | None) -> str | None:
    """Returns the location of the compile cache; ``{host}`` is added to a folder, so that each machine of a job has its
    own. Machines usually share the file system from which a job is submitted, but cannot share a cache on it."""
    if not cache or is_s3(cache) or HOST in cache:
        return cache
    return os.path.join(cache, HOST)


def describe_batch_files(
    place: str, plan: LaunchPlan, options: Sequence[str], cache: str | None = None, *, requeue: bool = False
) -> list[BatchFile]:
    """Returns the batch file of a training run and, if graphs can be precompiled, that of its compile job.

    Args:
        place: path of the batch file for training, or a folder for both (``run.slurm`` and ``compile.slurm``).
        plan: the launch.
        options: options of ``neuron-accel launch`` that are the same on all machines, the script, and its arguments.
        cache: the ``--cache-dir`` among the options, for the tool that compiles.
        requeue: whether the training job gets SIGTERM before its time limit, and is queued again if that ends it.

    Returns:
        the files in the order in which to submit them; that for training is the last.

    Raises:
        ConfigurationError: if ``place`` is empty, or the port is larger than :data:`LAST_PORT`.
    """
    port = plan.request.master_port or DEFAULT_MASTER_PORT
    if plan.is_elastic:
        raise ConfigurationError(
            f"--nnodes {plan.fewest}:{plan.request.nnodes} is not possible in a batch file.",
            where="--slurm",
            why="a Slurm job has a fixed number of machines, and is queued again if one is lost",
            fix="pass one number of machines, and --requeue",
        )
    if not place:
        raise ConfigurationError("The path is empty.", where="--slurm", fix="pass a file or a folder")
    if port > LAST_PORT:
        raise ConfigurationError(
            f"Port {port} is too high.",
            where="--master-port",
            why="each job adds up to 999 to it, so that jobs on the same machine use different ports",
            fix=f"pass at most {LAST_PORT}, or leave it out",
        )
    training, compilation = _paths(Path(place))
    kinds = [(training, LAUNCH, f"Trains {plan.request.target}.")]
    if plan.device != "neuron":
        purpose = f"Compiles the graphs of {plan.request.target} into the compile cache, on all machines of training."
        precompile = f"neuron-accel precompile{f' --cache-dir={_quoted(cache)}' if cache else ''} -- {LAUNCH}"
        kinds.insert(0, (compilation, precompile, purpose))
    files = []
    for path, start, purpose in kinds:
        again = requeue and path == training
        text = TEMPLATE.format(
            name=re.sub(r"[^\w.-]", "_", path.stem),
            nodes=plan.request.nnodes,
            purpose=purpose,
            file=shlex.quote(path.name),
            port=port,
            ports=JOB_PORTS,
            task=shlex.quote(TASK.format(start=start)),
            arguments=shlex.join(options),
            wait=math.ceil(plan.request.grace + plan.heartbeat) + ROOM_SECONDS,
            directives=REQUEUE.format(seconds=math.ceil(plan.request.grace) + ROOM_SECONDS) if again else "",
            after=AFTER if again else "",
        )
        files.append(BatchFile(path=path, text=text, purpose=purpose))
    return files


def _quoted(text: str) -> str:
    """Quotes a word for the shell; braces without a comma need no quotes."""
    return text if re.fullmatch(r"[\w./:@%+={}-]+", text) else shlex.quote(text)


def _paths(path: Path) -> tuple[Path, Path]:
    if path.is_dir():
        return path / "run.slurm", path / "compile.slurm"
    return path, path.with_name(f"{path.stem}_compile{path.suffix}")


def write_batch_files(files: Sequence[BatchFile]) -> None:
    """Writes batch files; existing ones are overwritten.

    Raises:
        ConfigurationError: if a file cannot be written, or exists and is not a batch file of this command.
    """
    for file in files:
        _check_place(file.path)
    for file in files:
        try:
            file.path.write_text(file.text)
            file.path.chmod(0o755)
        except OSError as error:
            raise ConfigurationError(
                f"{file.path} cannot be written: {error.strerror}.", where="--slurm", fix="pass another file"
            ) from None


def _check_place(path: Path) -> None:
    """Checks that no other file is overwritten, as with ``--slurm train.py`` by mistake."""
    beginning = TEMPLATE.partition("{")[0]
    try:
        with path.open(errors="replace") as file:
            found = file.read(len(beginning))
    except OSError:  # it does not exist, or writing will fail as well
        return
    if found and found != beginning:
        raise ConfigurationError(
            f"{path} exists, and was not written by this command.",
            where="--slurm",
            why="it would be overwritten",
            fix="pass another file, or remove it",
        )
