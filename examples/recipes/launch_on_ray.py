"""Trains on nodes of a Ray cluster: Ray chooses the nodes, and `neuron-accel launch` starts the ranks of each.

python launch_on_ray.py --nnodes 4 -- --nproc-per-node 64 --instance trn2.48xlarge train.py \\
    llama-3.1-70b/pretrain-trn2.48xlarge.yaml --data tokens

What follows -- is that of `neuron-accel launch`, without the options about machines. The nodes share this folder.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import uuid

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LOST = 75
"""The exit code of a launch that has lost a machine."""


class Machine:
    """A node, on which one launcher runs."""

    def rendezvous(self) -> tuple[str, int]:
        """Its address, and a port that is free there."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def launch(self, words: list[str], folder: str, run: str) -> int:
        """Starts the ranks of this node; returns the exit code of the launch."""
        from neuron_accel.commands import main as neuron_accel

        os.chdir(folder)
        os.environ["NEURON_ACCEL_RUN"] = run  # of all starts, so that a save of a lost node is taken over
        os.environ.pop("NEURON_RT_VISIBLE_CORES", None)  # Ray's; the ranks have all cores of the instance
        return neuron_accel(["launch", *words])


def launch(nnodes: int, words: list[str], run: str) -> int:
    """Launches on as many nodes, once there are; returns 0, or the exit code of a launcher that failed."""
    group = placement_group([{"CPU": 1}] * nnodes, strategy="STRICT_SPREAD")  # each on another node
    ray.get(group.ready())
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank) for rank in range(nnodes)]
    machines = [ray.remote(Machine).options(num_cpus=1, scheduling_strategy=place).remote() for place in places]
    codes = []
    try:
        address, port = ray.get(machines[0].rendezvous.remote())
        where = ["--nnodes", str(nnodes), "--master-addr", address, "--master-port", str(port)]
        started = [
            machine.launch.remote([*where, "--node-rank", str(rank), *words], os.getcwd(), run)
            for rank, machine in enumerate(machines)
        ]
        for code in started:  # launchers end soon after one that fails or is lost
            try:
                codes.append(ray.get(code))
            except RayError as error:
                print(f"launch_on_ray.py: a node is lost: {error}", file=sys.stderr)
                codes.append(LOST)
    finally:
        for machine in machines:
            ray.kill(machine)
        remove_placement_group(group)
    return next((code for code in codes if code), 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nnodes", type=int, required=True, help="nodes; each runs one launcher")
    parser.add_argument("--max-failures", type=int, default=0, help="how often to start again (default: 0)")
    parser.add_argument("words", nargs="+", metavar="...", help="after --: arguments of neuron-accel launch")
    options = parser.parse_args()
    ray.init()
    run = uuid.uuid4().hex
    for start in range(options.max_failures + 1):
        code = launch(options.nnodes, options.words, run)
        if code == 0:
            break
        print(f"launch_on_ray.py: start {start + 1} of {options.max_failures + 1} failed: {code}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
