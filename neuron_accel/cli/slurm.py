"""Batch files for Slurm: one task for each machine, which starts the ranks there."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from neuron_accel.cli.launch_plan import DEFAULT_MASTER_PORT, LaunchPlan
from neuron_accel.engine.errors import ConfigurationError

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
port=$(({port} + SLURM_JOB_ID % 1000))

# --kill-on-bad-exit: when one machine fails, the others end too
srun --kill-on-bad-exit=1 bash -c \\
  'exec {start} --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" "$@"' neuron-accel \\
  --master-addr "$master" --master-port "$port" {arguments}
"""

LAUNCH = "neuron-accel launch"
PRECOMPILE = "neuron-accel precompile -- neuron-accel launch"


def batch_files(path: Path) -> tuple[Path, Path]:
    """The batch file of a training and that of its compile job, beside it; in a folder ``run.slurm`` and
    ``compile.slurm``."""
    if path.is_dir():
        return path / "run.slurm", path / "compile.slurm"
    return path, path.with_name(f"{path.stem}_compile{path.suffix}")


def write_batch_files(path: Path, plan: LaunchPlan, options: Sequence[str]) -> list[tuple[Path, str]]:
    """Writes the batch file of a training and, where graphs are compiled ahead, that of its compile job.

    Args:
        path: of the training's, or a folder for both.
        plan: the launch.
        options: of ``neuron-accel launch`` but for those that say which machine it is; then the script and its
            arguments.

    Returns:
        Each file and what it is for, in the order in which to submit them.

    Raises:
        ConfigurationError: if one cannot be written.
    """
    training, compilation = batch_files(path)
    files = [(training, LAUNCH, f"Trains {plan.request.target}.")]
    if plan.device != "neuron":
        purpose = f"Compiles the graphs of {plan.request.target} into the compile cache; on as many machines as train."
        files.insert(0, (compilation, PRECOMPILE, purpose))
    for file, start, purpose in files:
        text = TEMPLATE.format(
            name=file.stem,
            nodes=plan.request.nnodes,
            purpose=purpose,
            file=shlex.quote(file.name),
            port=plan.request.master_port or DEFAULT_MASTER_PORT,
            start=start,
            arguments=shlex.join(options),
        )
        try:
            file.write_text(text)
            file.chmod(0o755)
        except OSError as error:
            raise ConfigurationError(
                f"{file} cannot be written: {error.strerror}.", where="--slurm", fix="name another file"
            ) from None
    return [(file, purpose) for file, _, purpose in files]
